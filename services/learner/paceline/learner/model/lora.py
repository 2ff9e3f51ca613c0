"""Low-rank adapters (LoRA, arXiv:2106.09685): y = W x + (alpha / r) B A x with W frozen; A and B train.

W keeps its name, so that pushes and exports of merged weights know it. A and B are split over the ranks by
rows, as W is: the rows of B that a rank holds belong to the rows of W that it holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

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
        """As the class says."""
        frozen = F.linear(input, self.weight, self.bias)
        if not self.is_adapted:
            return frozen
        return frozen + self.scale * F.linear(F.linear(input, self.lora_a), self.lora_b)


def add_adapters(lm: nn.Module, layers: nn.ModuleList, lora: LoraConfig) -> None:
    """Freezes a model and gives adapters to the linear layers that `lora.targets` name; before it is sharded.

    Raises:
        ConfigError: a target names no linear layer of the decoder layers.
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
        if _ALL in lora.targets or name.rpartition(".")[2] in lora.targets:
            LoraLinear.convert(linear, lora)


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
            _local(module.weight).add_(_product(module))
        yield
    finally:
        for module, values in zip(adapted, kept, strict=True):
            _local(module.weight).copy_(values)


def merged(
    base: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor], lora: LoraConfig
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors of a model with its adapters merged, one at a time; in float32 where there is one.

    Args:
        base: full tensors of the model, as it was trained with.
        adapters: full tensors of A and B, by the names of parameters.
        lora: of the run.
    """
    for name, tensor in base:
        linear = name.removesuffix(".weight")
        if linear != name and linear + A in adapters:
            product = lora.alpha / lora.rank * (adapters[linear + B] @ adapters[linear + A])
            yield name, tensor.float() + product
        else:
            yield name, tensor


def _product(module: LoraLinear) -> Tensor:
    """This rank's rows of (alpha / r) B A, in the type of W; every rank calls it."""
    a = module.lora_a.full_tensor() if isinstance(module.lora_a, DTensor) else module.lora_a
    return (module.scale * _local(module.lora_b) @ a).to(module.weight.dtype)


def _adapted(network: nn.Module) -> list[LoraLinear]:
    return [module for module in network.modules() if isinstance(module, LoraLinear)]


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
