"""Says which part of a sharded parameter a rank has."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from paceline.core.errors import ModelError
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import chunk_rows


def own_box(parameter: torch.Tensor, name: str = "a parameter") -> Box:
    """Returns the box of a parameter that this rank holds.

    Experts may be divided over ranks before FSDP shards them. Their placement by FSDP is then a strided one
    and comes first, although it divides what the other one has left.

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


def local_rows(parameter: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Returns this rank's part of a parameter, and its rows [start, stop) in dimension 0."""
    if not isinstance(parameter, DTensor):
        return parameter, 0, parameter.shape[0]
    box = own_box(parameter)
    return parameter.to_local(), box.start[0], box.stop[0]
