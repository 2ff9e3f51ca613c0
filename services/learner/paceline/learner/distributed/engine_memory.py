"""Frees memory that torch's allocator only caches, if an engine on this rank's GPU needs it.

Freeing memory takes tenths of a second, and so does allocating it again in the next step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from paceline.core.members import EnginePart
from paceline.engines.memory import MARGIN
from paceline.learner.distributed.collectives import gather_bytes
from paceline.learner.distributed.ranks import Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleasedMemory:
    """The result of `release_memory` on all ranks: freed bytes, and whether a whole engine now has room."""

    freed_bytes: int
    has_room: bool


class GpuMemory:
    """The memory of a rank's GPU; on a CPU it always says that there is enough."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    @property
    def total(self) -> int:
        """Bytes that the GPU has."""
        return torch.cuda.mem_get_info(self._device)[1] if self._device else 0

    @property
    def free(self) -> int:
        """Bytes that no process has."""
        return torch.cuda.mem_get_info(self._device)[0] if self._device else 1 << 62

    @property
    def of_others(self) -> int:
        """Bytes of other processes, and of this one outside torch's allocator."""
        return self.total - self.free - torch.cuda.memory_reserved(self._device) if self._device else 0

    @property
    def peak(self) -> int:
        """The most bytes of tensors since this process started or the peak was last reset."""
        return torch.cuda.max_memory_allocated(self._device) if self._device else 0

    def give_back(self) -> int:
        """Frees memory that torch's allocator only caches; returns its bytes.

        Read `free` again afterwards: an engine may have allocated meanwhile.
        """
        if self._device is None:
            return 0
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.empty_cache()
        return before - torch.cuda.memory_reserved(self._device)


def release_memory(
    parts: Sequence[EnginePart],
    needed: Callable[[Collection[EnginePart]], int],
    memory: GpuMemory,
    ranks: Ranks,
) -> ReleasedMemory:
    """Frees cached memory if these parts of an engine lack room; frees all of it if `parts` is empty.

    Every rank calls it.

    Args:
        parts: parts that wake next and have no memory yet.
        needed: returns the bytes of the GPU that parts of an engine take when they wake.
    """
    free, freed = memory.free, 0
    if not parts or free < needed(parts):
        freed = memory.give_back()
    has_room = freed > 0 or not parts or free >= needed(tuple(EnginePart))
    told = [json.loads(data) for data in gather_bytes(json.dumps([freed, has_room]).encode(), ranks)]
    return ReleasedMemory(freed_bytes=sum(part[0] for part in told), has_room=all(part[1] for part in told))


def release_if_short(memory: GpuMemory) -> None:
    """Frees cached memory if an awake engine on this rank's GPU could hardly allocate.

    Otherwise the engine's allocator would fail at every step of a batch, and empty its own cache each time.
    """
    if memory.free < MARGIN < memory.of_others:
        memory.give_back()
