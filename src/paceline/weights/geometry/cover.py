"""Covering: which source supplies which part of a needed box, each element exactly once, evenly spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import WeightSyncError
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, TensorSlice

_SMALLEST_SPLIT = 1 << 14
"""Elements below which a replicated part is not cut up among its sources: messages are few and large"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A box of a tensor that somebody wants; `label` names them in errors."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """A part of need number `need` that source number `source` supplies out of its `held` slice."""

    need: int
    source: int
    held: TensorSlice
    box: Box


def assign_sources(sources: Sequence[RankLayout], needs: Sequence[Need]) -> list[Supply]:
    """Splits every need among the sources that hold it.

    What only one source holds leaves from there. What several hold (learner replicas, unsharded tensors) goes,
    largest first, to the holder that has the least to send so far; large parts are cut into as many as there
    are holders. The result is a function of the arguments alone, so every rank computes the same.

    Raises:
        WeightSyncError: part of a need is held by no source, or the two disagree about the tensor's shape.
    """
    held: dict[str, list[tuple[int, TensorSlice]]] = {}
    for source, layout in enumerate(sources):
        for part in layout.slices:
            held.setdefault(part.name, []).append((source, part))
    supplies: list[Supply] = []
    load = [0] * len(sources)
    contested: list[tuple[int, Box, list[tuple[int, TensorSlice]]]] = []
    for index, need in enumerate(needs):
        holders = _holders(held.get(need.name, []), need)
        for box, owners in _regions(need, holders):
            if len(owners) > 1:
                contested += [(index, part, owners) for part in _cut(box, len(owners))]
            else:
                source, part = owners[0]
                supplies.append(Supply(need=index, source=source, held=part, box=box))
                load[source] += box.volume
    contested.sort(key=lambda item: (-item[1].volume, item[0], item[1]))
    for index, box, owners in contested:
        # Among equals, start from another source for every need: receivers then draw on different senders.
        source, part = min(owners, key=lambda owner: (load[owner[0]], (owner[0] - index) % len(sources)))
        supplies.append(Supply(need=index, source=source, held=part, box=box))
        load[source] += box.volume
    supplies.sort(key=lambda item: (item.need, item.box, item.source))
    return supplies


def _holders(held: list[tuple[int, TensorSlice]], need: Need) -> list[tuple[int, TensorSlice]]:
    for source, part in held:
        if part.global_shape != need.global_shape:
            raise WeightSyncError(
                f"{need.name}: learner {source} holds shape {part.global_shape} but {need.label} needs "
                f"{need.global_shape}; the two sides do not run the same model"
            )
    return [(source, part) for source, part in held if part.box.intersect(need.box) is not None]


def _regions(
    need: Need, holders: list[tuple[int, TensorSlice]]
) -> list[tuple[Box, list[tuple[int, TensorSlice]]]]:
    """Cuts the need into disjoint boxes, each with the list of all who hold it in full."""
    pending: list[Box] = [need.box] if need.box.volume else []
    regions: list[tuple[Box, list[tuple[int, TensorSlice]]]] = []
    while pending:
        box = pending.pop()
        first = next((part.box.intersect(box) for _, part in holders if part.box.intersect(box)), None)
        if first is None:
            raise WeightSyncError(
                f"{need.name}: no learner holds {box.start}..{box.stop}, which {need.label} needs; "
                "check that both sides load the same model configuration"
            )
        # Another holder's border may run through the common box: shrink until each holds all of it or none.
        for _, part in holders:
            common = part.box.intersect(first)
            first = common if common is not None else first
        owners = [(source, part) for source, part in holders if part.box.contains(first)]
        regions.append((first, owners))
        pending += box.subtract(first)
    return regions


def _cut(box: Box, parts: int) -> list[Box]:
    """Cuts a large box along its longest dimension into about equal parts; leaves a small one whole."""
    shape = box.shape
    dim = max(range(len(shape)), key=lambda d: (shape[d], -d))
    parts = min(parts, shape[dim], box.volume // _SMALLEST_SPLIT)
    pieces: list[Box] = []
    for left in range(parts, 1, -1):
        low, box = box.split(dim, box.start[dim] + box.shape[dim] // left)
        pieces.append(low)
    return [*pieces, box]
