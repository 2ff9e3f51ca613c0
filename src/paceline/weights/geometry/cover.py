"""Covering: which source supplies which part of a needed box, each element exactly once, spread evenly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import WeightSyncError
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, TensorSlice

_SMALLEST_SPLIT = 1 << 14
"""A replicated part smaller than two of these, in elements, is not split: few large messages are better"""

_Holder = tuple[int, TensorSlice]
"""A source's number, and its slice that contains a box"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A box of a tensor that has to be supplied; `label` says in errors for whom."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """A part of need number `need` that source number `source` supplies out of `source_slice`."""

    need: int
    source: int
    source_slice: TensorSlice
    box: Box


def assign_sources(sources: Sequence[RankLayout], needs: Sequence[Need]) -> list[Supply]:
    """Splits every need among the sources that hold it.

    A box that only one source holds comes from that source. A box that several hold (learner replicas,
    unsharded tensors) is assigned, largest first, to the holder with the least to send so far; a large one is
    first cut into as many parts as there are holders. The result depends on the arguments alone, so every
    rank computes the same.

    Raises:
        WeightSyncError: no source holds a part of a need, or source and need disagree about the tensor's
            shape.
    """
    by_name: dict[str, list[_Holder]] = {}
    for source, layout in enumerate(sources):
        for part in layout.slices:
            by_name.setdefault(part.name, []).append((source, part))
    supplies: list[Supply] = []
    load = [0] * len(sources)
    contested: list[tuple[int, Box, list[_Holder]]] = []
    for index, need in enumerate(needs):
        for box, owners in _regions(need, _holders(by_name.get(need.name, []), need)):
            if len(owners) > 1:
                contested += [(index, part, owners) for part in _cut(box, len(owners))]
            else:
                source, part = owners[0]
                supplies.append(Supply(need=index, source=source, source_slice=part, box=box))
                load[source] += box.volume
    contested.sort(key=lambda item: (-item[1].volume, item[0], item[1]))
    for index, box, owners in contested:
        # Of equally loaded holders each need prefers another one: receivers then draw on different senders.
        source, part = min(owners, key=lambda owner: (load[owner[0]], (owner[0] - index) % len(sources)))
        supplies.append(Supply(need=index, source=source, source_slice=part, box=box))
        load[source] += box.volume
    supplies.sort(key=lambda item: (item.need, item.box, item.source))
    return supplies


def _holders(candidates: list[_Holder], need: Need) -> list[_Holder]:
    """The candidates that hold a part of the need."""
    for source, part in candidates:
        if part.global_shape != need.global_shape:
            raise WeightSyncError(
                f"{need.name}: learner {source} holds shape {part.global_shape} but {need.label} needs "
                f"{need.global_shape}; the two sides do not run the same model"
            )
    return [(source, part) for source, part in candidates if part.box.intersect(need.box) is not None]


def _regions(need: Need, holders: list[_Holder]) -> list[tuple[Box, list[_Holder]]]:
    """Cuts the need into disjoint boxes, each with all sources that hold it completely."""
    pending: list[Box] = [need.box] if need.box.volume else []
    regions: list[tuple[Box, list[_Holder]]] = []
    while pending:
        box = pending.pop()
        first = next((part.box.intersect(box) for _, part in holders if part.box.intersect(box)), None)
        if first is None:
            raise WeightSyncError(
                f"{need.name}: no learner holds {box.start}..{box.stop}, which {need.label} needs; "
                "check that both sides load the same model configuration"
            )
        # Another holder's border may cut through this box: shrink it until each holds all of it or nothing.
        for _, part in holders:
            common = part.box.intersect(first)
            first = common if common is not None else first
        owners = [(source, part) for source, part in holders if part.box.contains(first)]
        regions.append((first, owners))
        pending += box.subtract(first)
    return regions


def _cut(box: Box, num_parts: int) -> list[Box]:
    """Cuts a large box along its longest dimension into about equal parts; a small box stays as it is."""
    shape = box.shape
    dim = max(range(len(shape)), key=lambda d: (shape[d], -d))
    num_parts = min(num_parts, shape[dim], box.volume // _SMALLEST_SPLIT)
    parts: list[Box] = []
    for left in range(num_parts, 1, -1):
        low, box = box.split(dim, box.start[dim] + box.shape[dim] // left)
        parts.append(low)
    return [*parts, box]
