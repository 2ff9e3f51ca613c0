"""Adds low-rank adapters (LoRA, arXiv:2106.09685): y = (W + (alpha / r) B A) x; only A and B train.

Every pass computes with the merged matrix, rounded as on rollout servers. If W x and B A x were computed
separately, bfloat16 would round the trained policy differently from the sampling one.

W keeps its name, so that pushes and exports of merged weights find it. A and B are sharded by rows, like W: a
rank's rows of B belong to its rows of W. The matrices of a layer's experts are stacked in one parameter, and
so are their A and B, whose rows are experts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import register_flop_formula

from paceline.config.model import LoraConfig
from paceline.core.errors import ConfigError
from paceline.learner.distributed.host_memory import local_part
from paceline.learner.distributed.shards import own_box
from paceline.learner.model.architectures import UncompilableError, stacks_of

A, B = ".lora_a", ".lora_b"
"""Endings of the names of an adapter's two matrices."""

_ALL = "all"
_STACKS = "adapters"
"""The module of experts that has their adapters, each under the name of its parameter."""


class LoraLinear(nn.Linear):
    """A frozen linear layer with an adapter.

    Attributes:
        lora_a: (r, in), in float32.
        lora_b: (out, r), in float32.
        scale: alpha / r.
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float
    is_adapted: bool

    @staticmethod
    def convert(linear: nn.Linear, lora: LoraConfig) -> None:
        """Turns a linear layer into one with an adapter, in place."""
        linear.requires_grad_(False)
        rank, device = lora.rank, linear.weight.device
        linear.__class__ = LoraLinear
        assert isinstance(linear, LoraLinear)
        linear.lora_a = nn.Parameter(torch.empty(rank, linear.in_features, device=device))
        linear.lora_b = nn.Parameter(torch.empty(linear.out_features, rank, device=device))
        linear.scale = lora.alpha / rank
        linear.is_adapted = True

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the base class's name
        """Applies the layer with its adapter."""
        if not self.is_adapted:
            return F.linear(input, self.weight, self.bias)
        output: Tensor = _merged_linear(input, self.weight, self.bias, self.lora_a, self.lora_b, self.scale)
        return output


# These two operators are opaque to compilers, which would otherwise keep every layer's merged matrix for the
# backward pass instead of recomputing it.
@torch.library.custom_op("paceline::merged_linear", mutates_args=())
def _merged_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
) -> Tensor:
    """Applies F.linear with the merged matrix; a higher rank makes the gradients of A and B costlier."""
    return F.linear(x, merge(weight, a, b, scale), bias)


@torch.library.custom_op("paceline::merged_linear_backward", mutates_args=())
def _merged_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float, needs_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    inputs, outputs = x.flatten(0, -2), grad.flatten(0, -2)
    grad_a = scale * (outputs @ b).T @ inputs
    grad_b = scale * outputs.T @ (inputs @ a.T)
    return grad @ merge(weight, a, b, scale) if needs_x else x.new_empty(0), grad_a, grad_b


def _result(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float, needs_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape if needs_x else 0), a.new_empty(a.shape), b.new_empty(b.shape)


def _operations(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * weight[0]


def _backward_operations(
    grad: torch.Size, x: torch.Size, weight: torch.Size, a: torch.Size, *others: Any, **_: Any
) -> int:
    num_tokens, (num_out, num_in), needs_x = math.prod(x[:-1]), weight, others[-1]
    return 2 * num_tokens * (2 * a[0] * (num_in + num_out) + (num_in * num_out if needs_x else 0))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, a, b, ctx.scale = inputs
    ctx.save_for_backward(x, weight, a, b)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs_x = ctx.needs_input_grad[0]
    grad_x, grad_a, grad_b = _merged_linear_backward(grad, *ctx.saved_tensors, ctx.scale, needs_x)
    return grad_x if needs_x else None, None, None, grad_a, grad_b, None


_merged_linear.register_fake(_result)
_merged_linear.register_autograd(_backward, setup_context=_save)
_merged_linear_backward.register_fake(_gradients)
# The cost, without merging, by which compilers choose the activations to keep.
register_flop_formula(torch.ops.paceline.merged_linear)(_operations)
register_flop_formula(torch.ops.paceline.merged_linear_backward)(_backward_operations)


class _StackedAdapter(nn.Module):
    """A and B of a parameter (E, m, n) that stacks the matrices of E experts.

    Attributes:
        lora_a: (E, r, n), in float32.
        lora_b: (E, m, r), in float32.
    """

    def __init__(self, stack: Tensor, rank: int) -> None:
        super().__init__()
        num_experts, height, width = stack.shape
        self.lora_a = nn.Parameter(torch.empty(num_experts, rank, width, device=stack.device))
        self.lora_b = nn.Parameter(torch.empty(num_experts, height, rank, device=stack.device))


def _adapt_experts(experts: Any, names: Iterable[str], lora: LoraConfig) -> None:
    """Adds adapters to these parameters of a layer's experts, in place."""
    adapters = nn.ModuleDict({name: _StackedAdapter(getattr(experts, name), lora.rank) for name in names})
    experts.add_module(_STACKS, adapters)
    experts.scale, experts.is_adapted = lora.alpha / lora.rank, True
    kind: Any = type(experts)
    experts.__class__ = _adapted_kind(kind)


@cache
def _adapted_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns the class of experts of this kind that compute with merged matrices."""

    def forward(self: Any, *inputs: Tensor) -> Tensor:
        plain: Any = kind.forward
        if not self.is_adapted:
            return plain(self, *inputs)  # type: ignore[no-any-return]
        merged_experts = _MergedExperts(self)
        with torch.autograd.graph.saved_tensors_hooks(merged_experts.pack, merged_experts.unpack):
            return plain(merged_experts, *inputs)  # type: ignore[no-any-return]

    return type(kind.__name__, (kind,), {"forward": forward})


class _MergedExperts:
    """The attributes of experts with merged matrices; their class's `forward` reads nothing else.

    The backward pass merges again instead of keeping a layer's merged matrices.
    """

    def __init__(self, experts: Any) -> None:
        self._experts = experts
        self._inputs: dict[int, tuple[Tensor, Tensor, Tensor, float]] = {}
        for name, adapter in getattr(experts, _STACKS).items():
            inputs = (getattr(experts, name), adapter.lora_a, adapter.lora_b, experts.scale)
            stack = merge(*inputs)
            setattr(self, name, stack)
            self._inputs[stack.untyped_storage().data_ptr()] = inputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)

    def pack(self, saved: Tensor) -> Any:
        """Keeps what a merged tensor is made of in its place, and every other tensor itself."""
        inputs = self._inputs.get(saved.untyped_storage().data_ptr())
        if inputs is None:
            return saved
        return inputs, saved.shape, saved.stride(), saved.storage_offset()

    @staticmethod
    def unpack(kept: Any) -> Tensor:
        """Returns the tensor that was given to `pack`."""
        if isinstance(kept, Tensor):
            return kept
        inputs, shape, stride, offset = kept
        with torch.no_grad():
            return merge(*inputs).as_strided(shape, stride, offset)


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Returns W + scale B A in the type of W, to which A and B are rounded first.

    Args:
        weight: (out, in), or some of its rows; or a stack of experts, (E, out, in).
        a: (r, in); or (E, r, in).
        b: (out, r), or the same rows; or (E, out, r).
        scale: alpha / r.
    """
    add = torch.addmm if weight.ndim == 2 else torch.baddbmm
    return add(weight, b.to(weight.dtype), a.to(weight.dtype), alpha=scale)


def add_adapters(lm: nn.Module, layers: nn.ModuleList, lora: LoraConfig) -> None:
    """Freezes a model and adds adapters to the layers of `lora.targets`; call it before sharding.

    Raises:
        ConfigError: a target names neither a linear layer nor experts of the decoder, or the rank exceeds a
            matrix's size.
    """
    linears = [(name, module) for name, module in layers.named_modules() if type(module) is nn.Linear]
    stacks = [(module, stacks_of(module)) for module in layers.modules() if stacks_of(module)]
    leaves = {name.rpartition(".")[2] for name, _ in linears}.union(*(names for _, names in stacks))
    unknown = [target for target in lora.targets if target not in (*leaves, _ALL)]
    if unknown:
        raise ConfigError(
            f"model.lora.targets names {unknown[0]}, which is no linear layer of {type(lm).__name__}; it has "
            f"{', '.join(sorted(leaves))}, and {_ALL} means all of them"
        )
    lm.requires_grad_(False)
    for name, linear in linears:
        leaf = name.rpartition(".")[2]
        # A single output, such as the weight of a shared expert, has nothing to gain from a low rank.
        if leaf in lora.targets or (_ALL in lora.targets and linear.out_features > 1):
            lora.require_room(leaf, linear.in_features, linear.out_features)
            LoraLinear.convert(linear, lora)
    for experts, names in stacks:
        chosen = [name for name in names if name in lora.targets or _ALL in lora.targets]
        for name in chosen:
            _, height, width = getattr(experts, name).shape
            lora.require_room(name, width, height)
        if chosen:
            _adapt_experts(experts, chosen, lora)


def require_compilable_adapters(lm: nn.Module) -> None:
    """Refuses to compile layers whose experts have adapters: a graph would keep their merged matrices.

    Raises:
        UncompilableError: experts have adapters.
    """
    if any(hasattr(module, _STACKS) and hasattr(module, "is_adapted") for module in lm.modules()):
        raise UncompilableError(
            f"experts of {type(lm).__name__} have adapters, and compiled layers would keep their merged "
            "matrices; set actor.compile: false, or leave the experts out of model.lora.targets"
        )


def described(lm: nn.Module, lora: LoraConfig) -> LoraConfig:
    """Returns the adapters' configuration with the layers' names in place of `all`."""
    targets = {name.removesuffix(A).rpartition(".")[2] for name in adapter_names(lm) if name.endswith(A)}
    return lora.model_copy(update={"targets": tuple(sorted(targets))})


def is_adapter(name: str) -> bool:
    """Returns whether a parameter is one of an adapter's matrices."""
    return name.endswith((A, B))


def adapter_names(lm: nn.Module) -> list[str]:
    """Returns the parameters that pushes omit, because they send merged weights."""
    return [name for name, _ in lm.named_parameters() if is_adapter(name)]


@contextlib.contextmanager
def base_alone(network: nn.Module) -> Iterator[None]:
    """Disables the adapters within the block, which leaves the starting model."""
    adapted = _adapted(network)
    for module in adapted:
        module.is_adapted = False
    try:
        yield
    finally:
        for module in adapted:
            module.is_adapted = True


@contextlib.contextmanager
@torch.no_grad()
def with_adapters(network: nn.Module) -> Iterator[None]:
    """Merges the adapters into this rank's shards of W within the block; every rank calls it.

    The shards keep their addresses, which pushes cache. Afterwards W has the same bits as before.
    """
    kept = [
        (local_part(weight), local_part(weight).clone())
        for module in _adapted(network)
        for weight, _, _ in _parts(module)
    ]
    try:
        for module in _adapted(network):
            for weight, a, b in _parts(module):
                local_part(weight).copy_(_merged_rows(weight, a, b, module.scale))
        yield
    finally:
        for weight, values in kept:
            weight.copy_(values)


def merged(
    base: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor], lora: LoraConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yields a model's full tensors with its adapters merged, as rollout servers hold them.

    Args:
        base: full tensors of the base model, as in training.
        adapters: full tensors of A and B, by the names of parameters.
    """
    for name, tensor in base:
        owner = _owner(name)
        if owner + A in adapters:
            yield name, merge(tensor, adapters[owner + A], adapters[owner + B], lora.alpha / lora.rank)
        else:
            yield name, tensor


def _owner(weight: str) -> str:
    """Returns the name of the module that has the adapter of a weight."""
    owner, _, leaf = weight.rpartition(".")
    return owner if leaf == "weight" else f"{owner}.{_STACKS}.{leaf}"


def _merged_rows(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Returns this rank's rows of the merged matrix, or its experts; every rank calls it."""
    if isinstance(a, DTensor) and a.ndim == 2:  # each row of W takes all rows of A
        a = a.full_tensor()[:, own_box(weight).slices[1]]
    return merge(local_part(weight), local_part(a), local_part(b), scale)


def _adapted(network: nn.Module) -> list[Any]:
    """Returns the linear layers and the experts that have adapters."""
    return [module for module in network.modules() if hasattr(module, "is_adapted")]


def _parts(module: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields W, A and B of each adapter of a module."""
    if isinstance(module, LoraLinear):
        yield module.weight, module.lora_a, module.lora_b
        return
    for name, adapter in getattr(module, _STACKS).items():
        yield module.get_parameter(name), adapter.lora_a, adapter.lora_b
