"""Says which part of a sharded parameter a rank has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from paceline.core.errors import ModelError
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import chunk_rows


def own_box(parameter: torch.Tensor, name: str = "a parameter") -> Box:
    """Returns the box of a parameter that this rank holds.

    Experts and matrices may be divided over ranks before FSDP shards them. Their placement by FSDP is then a
    strided one and comes first, although it divides what the other one has left.

    Args:
        parameter: complete or sharded.
        name: its name in errors.

    Raises:
        ModelError: the placements give a rank no single box.
    """
    box = Box.full(tuple(parameter.shape))
    if not isinstance(parameter, DTensor):
        return box
    mesh, placements = parameter.device_mesh, parameter.placements
    sharded = [index for index, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    if any(type(placements[index]) not in (Shard, _StridedShard) for index in sharded):
        raise ModelError(
            f"{name}: placements {placements} give a rank no single box; shard or replicate each parameter "
            "along every mesh dimension"
        )
    for index in sorted(sharded, key=lambda index: type(placements[index]) is _StridedShard):
        dim: int = placements[index].dim  # type: ignore[attr-defined]
        first, last = chunk_rows(box.shape[dim], mesh.get_local_rank(index), mesh.size(index))
        box = box.split(dim, box.start[dim] + last)[0].split(dim, box.start[dim] + first)[1]
    if tuple(parameter.to_local().shape) != box.shape:
        raise ModelError(
            f"{name}: the shard has shape {tuple(parameter.to_local().shape)}, expected {box.shape}"
        )
    return box


def own_part(parameter: torch.Tensor) -> tuple[torch.Tensor, Box]:
    """Returns this rank's part of a parameter, and its box."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local, own_box(parameter)


class OwnPart:
    """The attributes of a module, and of those in it, with this rank's part of each divided parameter."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, nn.ModuleDict):
            return {key: OwnPart(part) for key, part in value.items()}
        return self._part_of(value) if isinstance(value, DTensor) else value

    def _part_of(self, parameter: DTensor) -> Tensor:
        return parameter.to_local()
