"""Covering: which source supplies which part of a needed box, each element exactly once, spread evenly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.errors import WeightSyncError
from paceline.weights.geometry.box_table import BoxTable, IntArray
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, TensorSlice

_SMALLEST_SPLIT = 1 << 14
"""A replicated part smaller than two of these, in elements, is not split: few large messages are better"""

Holder = tuple[int, TensorSlice]
"""A source's number, and its slice that contains a box"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A box of a tensor that has to be supplied.

    Attributes:
        label: says in errors for whom.
        node: the one of all who need it; "" if they are on several, or it is not known.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    label: str
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """A part of need number `need` that source number `source` supplies out of `source_slice`."""

    need: int
    source: int
    source_slice: TensorSlice
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cover:
    """Who supplies what, as columns: one row per supplied part, ordered by (need, box, source).

    Attributes:
        needs: what is covered.
        holders: by tensor name, every source that holds a part of it.
        boxes: the table of the boxes.
        need, source, box: numbers of a row's need, source and box.
        holder: index of the source among the tensor's holders.
    """

    needs: Sequence[Need]
    holders: dict[str, list[Holder]]
    boxes: BoxTable
    need: IntArray
    source: IntArray
    box: IntArray
    holder: IntArray

    def source_slice(self, row: int) -> TensorSlice:
        """The source's slice that contains a row's box."""
        return self.holders[self.needs[int(self.need[row])].name][int(self.holder[row])][1]

    def of_source(self, source: int) -> list[Supply]:
        """Returns what one of the sources supplies."""
        return [self._supply(row) for row in np.flatnonzero(self.source == source).tolist()]

    def _supply(self, row: int) -> Supply:
        return Supply(
            need=int(self.need[row]),
            source=int(self.source[row]),
            source_slice=self.source_slice(row),
            box=self.boxes.boxes[self.box[row]],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Regions:
    """How a needed box is cut, for all tensors that lie alike on the sources.

    Attributes:
        source, box, holder: of the parts that one source alone holds, ordered by (box, source).
        contested: the others, each with all its holders.
    """

    source: IntArray
    box: IntArray
    holder: IntArray
    contested: tuple[tuple[Box, tuple[int, ...]], ...]


def assign_sources(sources: Sequence[RankLayout], needs: Sequence[Need]) -> Cover:
    """Splits every need among the sources that hold it.

    A box that only one source holds comes from that source. A box that several hold (copies of the learner's
    weights, unsharded tensors) comes from the node of those who need it, if some holders are there. It is
    assigned, largest first, to the holder with the least to send so far; a large one is first cut into as
    many parts as there are holders. The result depends on the arguments alone, so every rank computes the
    same.

    Tensors that lie alike on the sources, such as those of a model's layers, are cut once.

    Raises:
        WeightSyncError: no source holds a part of a need, or source and need disagree about the tensor's
            shape.
    """
    holders: dict[str, list[Holder]] = {}
    for source, layout in enumerate(sources):
        for part in layout.slices:
            holders.setdefault(part.name, []).append((source, part))
    boxes = BoxTable()
    regions = _cut_needs(needs, holders, boxes)
    counts = [len(cut.source) for cut in regions]
    need = np.repeat(np.arange(len(regions), dtype=np.int64), counts)
    columns = [
        np.concatenate([np.zeros(0, np.int64), *(getattr(cut, name) for cut in regions)])
        for name in ("source", "box", "holder")
    ]
    cover = Cover(
        needs=needs,
        holders=holders,
        boxes=boxes,
        need=need,
        source=columns[0],
        box=columns[1],
        holder=columns[2],
    )
    nodes = [layout.place.node for layout in sources]
    contested = [
        (number, part, near)
        for number, cut in enumerate(regions)
        for box, owners in cut.contested
        for near in (_near(owners, needs[number].node, holders[needs[number].name], nodes),)
        for part in _cut(box, len(near))
    ]
    return _with_contested(cover, contested, len(sources)) if contested else cover


def _cut_needs(needs: Sequence[Need], holders: dict[str, list[Holder]], boxes: BoxTable) -> list[_Regions]:
    """The regions of every need; needs of the same box of tensors that lie alike share theirs."""
    kinds: dict[tuple[object, ...], int] = {}
    kind_of: dict[str, int] = {}
    for name, parts in holders.items():
        lie = tuple((source, part.global_shape, part.box) for source, part in parts)
        kind_of[name] = kinds.setdefault(lie, len(kinds))
    known: dict[tuple[object, ...], _Regions] = {}
    regions: list[_Regions] = []
    for need in needs:
        key = (kind_of.get(need.name), need.global_shape, need.box)
        cut = known.get(key)
        if cut is None:
            cut = known[key] = _regions_of(need, holders.get(need.name, []), boxes)
        regions.append(cut)
    return regions


def _regions_of(need: Need, candidates: list[Holder], boxes: BoxTable) -> _Regions:
    for source, part in candidates:
        if part.global_shape != need.global_shape:
            raise WeightSyncError(
                f"{need.name}: learner {source} holds shape {part.global_shape} but {need.label} needs "
                f"{need.global_shape}; the two sides do not run the same model"
            )
    holders = [
        index for index, (_, part) in enumerate(candidates) if part.box.intersect(need.box) is not None
    ]
    cuts = _regions(need, candidates, holders)
    sole = sorted((box, candidates[owners[0]][0], owners[0]) for box, owners in cuts if len(owners) == 1)
    return _Regions(
        source=np.array([source for _, source, _ in sole], dtype=np.int64),
        box=np.array([boxes.add(box) for box, _, _ in sole], dtype=np.int64),
        holder=np.array([holder for _, _, holder in sole], dtype=np.int64),
        contested=tuple((box, owners) for box, owners in cuts if len(owners) > 1),
    )


def _near(
    owners: tuple[int, ...], node: str, candidates: list[Holder], nodes: Sequence[str]
) -> tuple[int, ...]:
    """Of several holders those on a node, or all if none is there or the node is not known."""
    return tuple(owner for owner in owners if node and nodes[candidates[owner][0]] == node) or owners


def _with_contested(
    cover: Cover, contested: list[tuple[int, Box, tuple[int, ...]]], num_sources: int
) -> Cover:
    """The cover with parts that several sources hold, each assigned to one of them."""
    loads = np.zeros(num_sources, dtype=np.int64)
    np.add.at(loads, cover.source, cover.boxes.volumes()[cover.box])
    load: list[int] = loads.tolist()
    contested.sort(key=lambda item: (-item[1].volume, item[0], item[1]))
    rows: list[tuple[int, int, int, int]] = []
    for number, box, owners in contested:
        candidates = cover.holders[cover.needs[number].name]

        # Of equally loaded holders each need prefers another one: receivers then draw on different senders.
        def burden(holder: int, number: int = number, parts: list[Holder] = candidates) -> tuple[int, int]:
            return load[parts[holder][0]], (parts[holder][0] - number) % num_sources

        holder = min(owners, key=burden)
        source = candidates[holder][0]
        rows.append((number, source, cover.boxes.add(box), holder))
        load[source] += box.volume
    added = np.array(rows, dtype=np.int64)
    need, source_column, box_column, holder_column = (
        np.concatenate([column, added[:, index]])
        for index, column in enumerate((cover.need, cover.source, cover.box, cover.holder))
    )
    order = np.lexsort((source_column, cover.boxes.ranks()[box_column], need))
    return Cover(
        needs=cover.needs,
        holders=cover.holders,
        boxes=cover.boxes,
        need=need[order],
        source=source_column[order],
        box=box_column[order],
        holder=holder_column[order],
    )


def _regions(need: Need, candidates: list[Holder], holders: list[int]) -> list[tuple[Box, tuple[int, ...]]]:
    """Cuts the need into disjoint boxes, each with all holders that have it completely."""
    pending: list[Box] = [need.box] if need.box.volume else []
    regions: list[tuple[Box, tuple[int, ...]]] = []
    parts = [(holder, candidates[holder][1].box) for holder in holders]
    while pending:
        box = pending.pop()
        first = next((part.intersect(box) for _, part in parts if part.intersect(box)), None)
        if first is None:
            raise WeightSyncError(
                f"{need.name}: no learner holds {box.start}..{box.stop}, which {need.label} needs; "
                "check that both sides load the same model configuration"
            )
        # Another holder's border may cut through this box: shrink it until each holds all of it or nothing.
        for _, part in parts:
            common = part.intersect(first)
            first = common if common is not None else first
        regions.append((first, tuple(holder for holder, part in parts if part.contains(first))))
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
