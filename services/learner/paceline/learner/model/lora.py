"""Low-rank adapters (LoRA, arXiv:2106.09685): y = (W + (alpha / r) B A) x with W frozen; A and B train.

Every pass computes with the merged matrix, rounded as rollout servers have it. With W x and B A x apart,
bfloat16 would round the policy that is trained otherwise than the one that samples.

W keeps its name, so that pushes and exports of merged weights know it. A and B are split over the ranks by
rows, as W is: the rows of B that a rank holds belong to the rows of W that it holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.config.model import LoraConfig
from paceline.core.errors import ConfigError, ModelError

A, B = ".lora_a", ".lora_b"
"""How the names of an adapter's two matrices end."""

_ALL = "all"


class LoraLinear(nn.Linear):
    """A frozen linear layer with an adapter.

    Attributes:
        lora_a: (r, in), in float32.
        lora_b: (out, r), in float32.
        scale: alpha / r.
        is_adapted: False computes the frozen layer alone.
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
        """Computes the sum that the class describes."""
        if not self.is_adapted:
            return F.linear(input, self.weight, self.bias)
        output: Tensor = _Merged.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.lora_a, self.lora_b, self.scale
        )
        return output


class _Merged(torch.autograd.Function):
    """F.linear with the merged matrix; gradients of A and B cost what their rank is."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return F.linear(x, merge(weight, a, b, scale), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        (grad,) = grads
        inputs, outputs = x.flatten(0, -2), grad.flatten(0, -2)
        grad_a = ctx.scale * (outputs @ b).T @ inputs
        grad_b = ctx.scale * outputs.T @ (inputs @ a.T)
        grad_x = grad @ merge(weight, a, b, ctx.scale) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, grad_a, grad_b, None


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale B A in the type of W, to which A and B are rounded first.

    Args:
        weight: (out, in), or some of its rows.
        a: (r, in).
        b: (out, r), or the same rows.
        scale: alpha / r.
    """
    return torch.addmm(weight, b.to(weight.dtype), a.to(weight.dtype), alpha=scale)


def add_adapters(lm: nn.Module, layers: nn.ModuleList, lora: LoraConfig) -> None:
    """Freezes a model and gives adapters to the linear layers that `lora.targets` name; before it is sharded.

    Raises:
        ConfigError: a target names no linear layer of the decoder layers, or the rank is above a layer's.
        ModelError: the model has experts, whose matrices are no linear layers.
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
    """The adapters of a model, with the names of the layers in place of `all`."""
    targets = {name.removesuffix(A).rpartition(".")[2] for name in adapter_names(lm) if name.endswith(A)}
    return lora.model_copy(update={"targets": tuple(sorted(targets))})


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of an adapter's matrices."""
    return name.endswith((A, B))


def adapter_names(lm: nn.Module) -> list[str]:
    """The parameters that no push sends: the weights are sent with the adapters merged into them."""
    return [name for name, _ in lm.named_parameters() if is_adapter(name)]


@contextlib.contextmanager
def base_alone(network: nn.Module) -> Iterator[None]:
    """Within the block the network computes without its adapters, as the model that training began with."""
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
    """Within the block this rank's shards of W are those of W + (alpha / r) B A; every rank calls it.

    The shards keep their addresses, which pushes remember. Afterwards W has the same bits as before.
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
    """Full tensors of a model with its adapters merged, one at a time, as rollout servers have them.

    Args:
        base: full tensors of the model, as it was trained with.
        adapters: full tensors of A and B, by the names of parameters.
        lora: of the run.
    """
    for name, tensor in base:
        linear = name.removesuffix(".weight")
        if linear != name and linear + A in adapters:
            yield name, merge(tensor, adapters[linear + A], adapters[linear + B], lora.alpha / lora.rank)
        else:
            yield name, tensor


def _merged_rows(module: LoraLinear) -> Tensor:
    """This rank's rows of the merged matrix; every rank calls it."""
    a = module.lora_a.full_tensor() if isinstance(module.lora_a, DTensor) else module.lora_a
    return merge(_local(module.weight), a, _local(module.lora_b), module.scale)


def _adapted(network: nn.Module) -> list[LoraLinear]:
    return [module for module in network.modules() if isinstance(module, LoraLinear)]


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
