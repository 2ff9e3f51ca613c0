"""Adds low-rank adapters (LoRA, arXiv:2106.09685): y = (W + (alpha / r) B A) x; only A and B train.

Every pass computes with the merged matrix, rounded as on rollout servers. If W x and B A x were computed
separately, bfloat16 would round the trained policy differently from the sampling one.

W keeps its name, so that pushes and exports of merged weights find it. A and B are sharded by rows, like W: a
rank's rows of B belong to its rows of W.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import register_flop_formula

from paceline.config.model import LoraConfig
from paceline.core.errors import ConfigError, ModelError

A, B = ".lora_a", ".lora_b"
"""Endings of the names of an adapter's two matrices."""

_ALL = "all"


class LoraLinear(nn.Linear):
    """A frozen linear layer with an adapter.

    Attributes:
        lora_a: (r, in), in float32.
        lora_b: (out, r), in float32.
        scale: alpha / r.
        is_adapted: whether the adapter is applied.
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


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Returns W + scale B A in the type of W, to which A and B are rounded first.

    Args:
        weight: (out, in), or some of its rows.
        a: (r, in).
        b: (out, r), or the same rows.
        scale: alpha / r.
    """
    return torch.addmm(weight, b.to(weight.dtype), a.to(weight.dtype), alpha=scale)


def add_adapters(lm: nn.Module, layers: nn.ModuleList, lora: LoraConfig) -> None:
    """Freezes a model and adds adapters to the layers of `lora.targets`; call it before sharding.

    Raises:
        ConfigError: a target names no linear layer of the decoder, or the rank exceeds a layer's size.
        ModelError: the model has experts, whose matrices are not linear layers.
    """
    if any(parameter.ndim == 3 for parameter in layers.parameters()):
        raise ModelError(f"model.lora: {type(lm).__name__} has experts, which take no adapters; leave it out")
    linears = [(name, module) for name, module in layers.named_modules() if type(module) is nn.Linear]
    leaves = sorted({name.rpartition(".")[2] for name, _ in linears})
    unknown = [target for target in lora.targets if target not in (*leaves, _ALL)]
    if unknown:
        raise ConfigError(
            f"model.lora.targets names {unknown[0]}, which is no linear layer of {type(lm).__name__}; it has "
            f"{', '.join(leaves)}, and {_ALL} means all of them"
        )
    lm.requires_grad_(False)
    for name, linear in linears:
        leaf = name.rpartition(".")[2]
        if _ALL in lora.targets or leaf in lora.targets:
            lora.require_room(leaf, linear.in_features, linear.out_features)
            LoraLinear.convert(linear, lora)


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
    adapted = _adapted(network)
    kept = [_local(module.weight).clone() for module in adapted]
    try:
        for module in adapted:
            _local(module.weight).copy_(_merged_rows(module))
        yield
    finally:
        for module, values in zip(adapted, kept, strict=True):
            _local(module.weight).copy_(values)


def merged(
    base: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor], lora: LoraConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yields a model's full tensors with its adapters merged, as rollout servers hold them.

    Args:
        base: full tensors of the base model, as in training.
        adapters: full tensors of A and B, by the names of parameters.
        lora: LoRA settings of the run.
    """
    for name, tensor in base:
        linear = name.removesuffix(".weight")
        if linear != name and linear + A in adapters:
            yield name, merge(tensor, adapters[linear + A], adapters[linear + B], lora.alpha / lora.rank)
        else:
            yield name, tensor


def _merged_rows(module: LoraLinear) -> Tensor:
    """Returns this rank's rows of the merged matrix; every rank calls it."""
    a = module.lora_a.full_tensor() if isinstance(module.lora_a, DTensor) else module.lora_a
    return merge(_local(module.weight), a, _local(module.lora_b), module.scale)


def _adapted(network: nn.Module) -> list[LoraLinear]:
    return [module for module in network.modules() if isinstance(module, LoraLinear)]


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
