"""Assigns the parts of needed boxes to sources: each element exactly once, with balanced load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from paceline.core.errors import WeightSyncError
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.columns import IntArray, padded, ranges
from paceline.weights.geometry.layout import RankLayout, TensorSlice
from paceline.weights.geometry.sharding import HeldPart, Sharding

_SMALLEST_SPLIT = 1 << 14
"""A replicated part with fewer than twice this many elements is not split: few large messages are better"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A box of a tensor that has to be supplied.

    Attributes:
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


class Region(NamedTuple):
    """How a needed box is cut, for all tensors with the same sharding.

    Attributes:
        sole: source, box and index of the part (among those of the tensor's kind) of boxes with one holder.
        contested: boxes that several sources hold, each with the indices of these sources' parts.
    """

    sole: list[tuple[int, Box, int]]
    contested: list[tuple[Box, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Cover:
    """Says which source supplies which part of each need. Needs that are cut alike share rows.

    Attributes:
        sharding: what the sources hold.
        region: how each need is cut, (needs,): the number of its rows, see `rows_of`.
        boxes: the distinct boxes of all rows.
        box, part: each row's box, and index of the source's part among those of the tensor's kind, (rows,).
        first: the first row of source s in region r at [r * sources + s]; ends with the number of rows.
    """

    sharding: Sharding
    needs: Sequence[Need]
    region: IntArray
    boxes: Sequence[Box]
    box: IntArray
    part: IntArray
    first: IntArray

    @classmethod
    def of(
        cls,
        sharding: Sharding,
        needs: Sequence[Need],
        region: Sequence[int],
        regions: Sequence[Sequence[tuple[int, Box, int]]],
    ) -> Cover:
        """Makes a cover from the rows (source, box, part) of each region."""
        numbers: dict[Box, int] = {}
        rows = [
            (number * len(sharding) + source, numbers.setdefault(box, len(numbers)), part)
            for number, own in enumerate(regions)
            for source, box, part in sorted(own)
        ]
        key, box, part = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        return cls(
            sharding=sharding,
            needs=needs,
            region=np.array(region, dtype=np.int64),
            boxes=list(numbers),
            box=box,
            part=part,
            first=np.searchsorted(key, np.arange(len(regions) * len(sharding) + 1)),
        )

    @cached_property
    def starts(self) -> IntArray:
        """First index of each box, (boxes, dims)."""
        return padded([box.start for box in self.boxes], self.sharding.num_dims)

    @cached_property
    def shapes(self) -> IntArray:
        """Extents of each box, (boxes, dims)."""
        return padded([box.shape for box in self.boxes], self.sharding.num_dims, fill=1)

    @cached_property
    def shape_numbers(self) -> IntArray:
        """A number for each box, equal for boxes of equal shape."""
        return np.unique(self.shapes, axis=0, return_inverse=True)[1].reshape(-1)

    @cached_property
    def volumes(self) -> IntArray:
        """Elements that each source supplies to each region, (regions, sources)."""
        before = np.concatenate([[0], np.cumsum(self.shapes.prod(axis=1)[self.box])])
        return np.diff(before[self.first]).reshape(-1, len(self.sharding))

    @cached_property
    def longest_rows(self) -> IntArray:
        """Elements of the longest row (one index of dimension 0) by region and source."""
        longest = np.zeros(self.volumes.size, dtype=np.int64)
        owner = np.repeat(np.arange(longest.size), np.diff(self.first))
        np.maximum.at(longest, owner, self.shapes[:, 1:].prod(axis=1)[self.box])
        return longest.reshape(self.volumes.shape)

    def rows_of(self, needs: IntArray, source: int) -> tuple[IntArray, IntArray]:
        """Returns the rows that a source supplies to some needs, each with its need's index in `needs`."""
        key = self.region[needs] * len(self.sharding) + source
        return ranges(self.first[key], self.first[key + 1] - self.first[key])

    def of_source(self, source: int) -> list[Supply]:
        """Returns the supplies of a source."""
        needs, rows = self.rows_of(np.arange(len(self.needs)), source)
        return [
            Supply(
                need=number,
                source=source,
                source_slice=self._slice(number, row),
                box=self.boxes[self.box[row]],
            )
            for number, row in zip(needs.tolist(), rows.tolist(), strict=True)
        ]

    def part_of(self, need: int, row: int) -> HeldPart:
        """Returns the source's part of a need's tensor from which a row is supplied."""
        kind = self.sharding.kinds[self.sharding.tensors[self.needs[need].name]]
        return kind.parts[int(self.part[row])]

    def _slice(self, number: int, row: int) -> TensorSlice:
        need = self.needs[number]
        return self.part_of(number, row).of_tensor(need.name, need.global_shape)


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
    sharding = Sharding.of(sources)
    numbers: dict[tuple[int | None, tuple[int, ...], Box], int] = {}
    regions: list[Region] = []
    region: list[int] = []
    for need in needs:
        key = (sharding.tensors.get(need.name), need.global_shape, need.box)
        region.append(numbers.setdefault(key, len(regions)))
        if region[-1] == len(regions):
            regions.append(_region_of(need, sharding))
    cover = Cover.of(sharding, needs, region, [cut.sole for cut in regions])
    return _assign_contested(cover, regions)


def _region_of(need: Need, sharding: Sharding) -> Region:
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
    return Region(
        sole=[(parts[owners[0]].source, box, owners[0]) for box, owners in cuts if len(owners) == 1],
        contested=[(box, owners) for box, owners in cuts if len(owners) > 1],
    )


def _assign_contested(cover: Cover, regions: Sequence[Region]) -> Cover:
    """Assigns parts that several sources hold; needs with such parts get separate rows."""
    sharding, needs, region = cover.sharding, cover.needs, cover.region.tolist()
    contested = [
        (number, part, near)
        for number, own in enumerate(region)
        for box, owners in regions[own].contested
        for near in (_near(owners, needs[number], sharding),)
        for part in _cut(box, len(near))
    ]
    if not contested:
        return cover
    copies = np.zeros(len(regions), dtype=np.int64)
    np.add.at(copies, cover.region, [need.copies for need in needs])
    load: list[int] = (copies @ cover.volumes).tolist()
    contested.sort(key=lambda item: (-item[1].volume, item[0], item[1]))
    added: dict[int, list[tuple[int, Box, int]]] = {}
    for number, box, owners in contested:
        parts = sharding.kinds[sharding.tensors[needs[number].name]].parts

        # Among equally loaded holders, each need prefers a different one, so receivers use different senders.
        def burden(owner: int, number: int = number, parts: Sequence[HeldPart] = parts) -> tuple[int, int]:
            return load[parts[owner].source], (parts[owner].source - number) % len(sharding)

        owner = min(owners, key=burden)
        added.setdefault(number, []).append((parts[owner].source, box, owner))
        load[parts[owner].source] += needs[number].copies * box.volume
    rows = [cut.sole for cut in regions]
    for number, own in added.items():
        rows.append([*rows[region[number]], *own])
        region[number] = len(rows) - 1
    return Cover.of(sharding, needs, region, rows)


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
