"""Assigns the parts of needed boxes to sources: each element exactly once, with balanced load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.errors import WeightSyncError
from paceline.weights.geometry.box_table import BoxTable, IntArray
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, TensorSlice
from paceline.weights.geometry.sharding import HeldPart, Sharding

_SMALLEST_SPLIT = 1 << 14
"""A replicated part with fewer than twice this many elements is not split: few large messages are better"""

_NOBODY = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A box of a tensor that has to be supplied.

    Attributes:
        label: names the receiver in errors.
        copies: number of ranks that need it, which weights it in its supplier's load.
        node: the node of all ranks that need it; "" if there are several, or if it is unknown.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    label: str
    copies: int = 1
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """A part of need number `need` that source number `source` supplies from `source_slice`."""

    need: int
    source: int
    source_slice: TensorSlice
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Regions:
    """How a needed box is cut, for all tensors with the same sharding: one row per part, by (box, source).

    Attributes:
        source, box: numbers of a part's source and box.
        part: index of the source's part among those of the tensor's kind.
        contested: boxes that several sources hold, each with the indices of these sources' parts.
        by_source: the rows of each source.
        volumes: elements that each source supplies, (sources,).
    """

    source: IntArray
    box: IntArray
    part: IntArray
    contested: tuple[tuple[Box, tuple[int, ...]], ...]
    by_source: dict[int, IntArray]
    volumes: IntArray

    @classmethod
    def of(
        cls,
        rows: Sequence[tuple[Box, int, int]],
        boxes: BoxTable,
        num_sources: int,
        contested: tuple[tuple[Box, tuple[int, ...]], ...] = (),
    ) -> Regions:
        """Makes regions from rows of (box, source, part)."""
        rows = sorted(rows)
        by_source: dict[int, list[int]] = {}
        volumes = np.zeros(num_sources, dtype=np.int64)
        for row, (box, source, _) in enumerate(rows):
            by_source.setdefault(source, []).append(row)
            volumes[source] += box.volume
        return cls(
            source=np.array([source for _, source, _ in rows], dtype=np.int64),
            box=np.array([boxes.add(box) for box, _, _ in rows], dtype=np.int64),
            part=np.array([part for _, _, part in rows], dtype=np.int64),
            contested=contested,
            by_source={source: np.array(own) for source, own in by_source.items()},
            volumes=volumes,
        )

    def rows_of(self, source: int) -> IntArray:
        """Returns the rows of a source."""
        return self.by_source.get(source, _NOBODY)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cover:
    """Says which source supplies which part of each need.

    Attributes:
        sharding: what the sources hold.
        needs: what is covered.
        boxes: the table of the boxes.
        regions: regions of each need; needs that are cut alike share an object.
    """

    sharding: Sharding
    needs: Sequence[Need]
    boxes: BoxTable
    regions: Sequence[Regions]

    def of_source(self, source: int) -> list[Supply]:
        """Returns the supplies of a source."""
        return [
            Supply(
                need=number,
                source=source,
                source_slice=self._slice(self.needs[number], int(regions.part[row])),
                box=self.boxes.boxes[regions.box[row]],
            )
            for number, regions in enumerate(self.regions)
            for row in regions.rows_of(source).tolist()
        ]

    def part_of(self, need: int, part: int) -> HeldPart:
        """Returns part number `part` of the kind of a need's tensor."""
        return self.sharding.kinds[self.sharding.tensors[self.needs[need].name]].parts[part]

    def _slice(self, need: Need, number: int) -> TensorSlice:
        part = self.sharding.kinds[self.sharding.tensors[need.name]].parts[number]
        return TensorSlice(
            name=need.name,
            global_shape=need.global_shape,
            box=part.box,
            param=part.param or need.name,
            offset=part.offset,
        )


def assign_sources(sources: Sequence[RankLayout], needs: Sequence[Need]) -> Cover:
    """Splits every need among the sources that hold it.

    A box with a single holder comes from that source. A box with several holders (copies of the learner's
    weights, unsharded tensors) comes from a holder on the receivers' node, if there is one. Such boxes are
    assigned largest first, each to the holder with the least to send so far; a large box is first cut into
    one part per holder. The result depends only on the arguments, so every rank computes the same.

    Tensors with the same sharding, such as those of a model's layers, are cut once.

    Raises:
        WeightSyncError: no source holds a part of a need, or source and need disagree about the tensor's
            shape.
    """
    sharding, boxes = Sharding.of(sources), BoxTable()
    known: dict[tuple[int | None, tuple[int, ...], Box], Regions] = {}
    regions: list[Regions] = []
    for need in needs:
        key = (sharding.tensors.get(need.name), need.global_shape, need.box)
        cut = known.get(key)
        if cut is None:
            cut = known[key] = _regions_of(need, sharding, boxes)
        regions.append(cut)
    _assign_contested(sharding, needs, regions, boxes)
    return Cover(sharding=sharding, needs=needs, boxes=boxes, regions=regions)


def _regions_of(need: Need, sharding: Sharding, boxes: BoxTable) -> Regions:
    kind = sharding.tensors.get(need.name)
    parts: Sequence[HeldPart] = () if kind is None else sharding.kinds[kind].parts
    if kind is not None and sharding.kinds[kind].shape != need.global_shape:
        raise WeightSyncError(
            f"{need.name}: learner {parts[0].source} holds shape {sharding.kinds[kind].shape} but "
            f"{need.label} needs {need.global_shape}; the two sides do not run the same model"
        )
    grid = None if kind is None else sharding.grids[kind]
    cuts = grid.cut(need.box) if grid is not None else None
    if cuts is None:
        cuts = _cut_overlapping(need, parts)
    return Regions.of(
        [(box, parts[owners[0]].source, owners[0]) for box, owners in cuts if len(owners) == 1],
        boxes,
        len(sharding),
        tuple((box, owners) for box, owners in cuts if len(owners) > 1),
    )


def _assign_contested(
    sharding: Sharding, needs: Sequence[Need], regions: list[Regions], boxes: BoxTable
) -> None:
    """Assigns parts that several sources hold; needs with such parts get separate regions."""
    contested = [
        (number, part, near)
        for number, cut in enumerate(regions)
        for box, owners in cut.contested
        for near in (_near(owners, needs[number], sharding),)
        for part in _cut(box, len(near))
    ]
    if not contested:
        return
    load = [0] * len(sharding)
    for need, cut in zip(needs, regions, strict=True):
        for source in cut.by_source:
            load[source] += need.copies * int(cut.volumes[source])
    contested.sort(key=lambda item: (-item[1].volume, item[0], item[1]))
    rows: dict[int, list[tuple[Box, int, int]]] = {}
    for number, box, owners in contested:
        parts = sharding.kinds[sharding.tensors[needs[number].name]].parts

        # Among equally loaded holders, each need prefers a different one, so receivers use different senders.
        def burden(owner: int, number: int = number, parts: Sequence[HeldPart] = parts) -> tuple[int, int]:
            return load[parts[owner].source], (parts[owner].source - number) % len(sharding)

        owner = min(owners, key=burden)
        rows.setdefault(number, []).append((box, parts[owner].source, owner))
        load[parts[owner].source] += needs[number].copies * box.volume
    for number, added in rows.items():
        cut = regions[number]
        columns = zip(cut.box.tolist(), cut.source.tolist(), cut.part.tolist(), strict=True)
        sole = [(boxes.boxes[box], source, part) for box, source, part in columns]
        regions[number] = Regions.of([*sole, *added], boxes, len(sharding))


def _near(owners: tuple[int, ...], need: Need, sharding: Sharding) -> tuple[int, ...]:
    """Returns the holders on the need's node, or all holders if none is there or the node is unknown."""
    parts = sharding.kinds[sharding.tensors[need.name]].parts
    here = (owner for owner in owners if need.node and sharding.places[parts[owner].source].node == need.node)
    return tuple(here) or owners


def _cut_overlapping(need: Need, parts: Sequence[HeldPart]) -> list[tuple[Box, tuple[int, ...]]]:
    """Cuts the need into disjoint boxes, each with all parts that contain it."""
    pending: list[Box] = [need.box] if need.box.volume else []
    regions: list[tuple[Box, tuple[int, ...]]] = []
    holders = [(number, part.box) for number, part in enumerate(parts) if part.box.intersect(need.box)]
    while pending:
        box = pending.pop()
        first = next((part.intersect(box) for _, part in holders if part.intersect(box)), None)
        if first is None:
            raise WeightSyncError(
                f"{need.name}: no learner holds {box.start}..{box.stop}, which {need.label} needs; "
                "check that both sides load the same model configuration"
            )
        # Another holder's border may cut this box: shrink it until each source holds all or none of it.
        for _, part in holders:
            common = part.intersect(first)
            first = common if common is not None else first
        regions.append((first, tuple(number for number, part in holders if part.contains(first))))
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
