"""Computes flows: what a learner rank sends to a set of rollout ranks with equal needs, in chunks.

A set of one rank is served directly. In a larger set, members take turns in receiving a chunk and relaying it
to the others: every byte leaves the learners once per set, and the members share the relaying.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from paceline.weights.geometry.box_table import BoxTable, IntArray
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.cover import Cover, Need, assign_sources
from paceline.weights.geometry.layout import RankLayout, TensorSlice
from paceline.weights.geometry.sharding import Sharding

SMALLEST_SHARE: Final = 0.02
"""Sets that share less than this fraction of all bytes get no separate messages."""

Members = tuple[int, ...]
"""Rollout ranks, ascending"""

Group = list[tuple[int, TensorSlice]]
"""Classes of rollout ranks that need the same box, ascending, each with its slice"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The elements that learner rank `source` sends to `members`, in the tensors' order.

    Attributes:
        volume: number of elements, each counted once for any number of receivers.
        longest_row: elements of the longest row of any of its boxes.
        content: the source and the indices of the sets of needs; equal for flows of equal boxes.
    """

    source: int
    members: Members
    volume: int
    longest_row: int
    content: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cargo:
    """A flow's rows as columns: need, box, part of the source's kind, and elements per row."""

    need: IntArray
    box: IntArray
    part: IntArray
    volume: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demand:
    """The needs of rollout ranks, and the learner ranks that supply them.

    Identical servers and layers are counted, not repeated, so the cost is that of one server.

    Attributes:
        cover: which source supplies which need.
        groups: for each need, the classes of rollout ranks that have it, each with its slice.
        class_of: the class of each rollout rank; ranks of a class have equal slices.
        sets: indices of needs, by the exact set of classes that have them.
        order: index of each need's tensor.
    """

    cover: Cover
    groups: list[Group]
    class_of: Sequence[int]
    sets: dict[tuple[int, ...], list[int]]
    order: IntArray

    @classmethod
    def of(cls, sharding: Sharding, destinations: Sequence[RankLayout], apart: Sequence[int]) -> Demand:
        """Computes the demand of rollout ranks.

        Args:
            destinations: layouts of the rollout ranks; those of the general path must have been expanded.
            apart: a number for each rollout rank; ranks with different numbers may have different sources.

        Raises:
            WeightSyncError: no source holds a needed part.
        """
        numbers: dict[tuple[int, int], int] = {}
        class_of = [
            numbers.setdefault((id(layout.slices), number), len(numbers))
            for layout, number in zip(destinations, apart, strict=True)
        ]
        examples = [class_of.index(number) for number in numbers.values()]
        groups = _group_needs([destinations[rank] for rank in examples], [apart[rank] for rank in examples])
        ranks = Counter(class_of)
        nodes: dict[int, set[str]] = {}
        for number, layout in zip(class_of, destinations, strict=True):
            nodes.setdefault(number, set()).add(layout.place.node)
        sets: dict[tuple[int, ...], list[int]] = {}
        needs: list[Need] = []
        for group in groups:
            sets.setdefault(tuple(number for number, _ in group), []).append(len(needs))
            number, part = group[0]
            around = set().union(*(nodes[several] for several, _ in group))
            needs.append(
                Need(
                    name=part.name,
                    global_shape=part.global_shape,
                    box=part.box,
                    label=f"rollout rank {examples[number]}",
                    copies=sum(ranks[several] for several, _ in group),
                    node=around.pop() if len(around) == 1 else "",
                )
            )
        order = {name: index for index, name in enumerate(sharding.tensors)}
        return cls(
            cover=assign_sources(sharding, needs),
            groups=groups,
            class_of=class_of,
            sets=sets,
            order=np.array([order[need.name] for need in needs], dtype=np.int64),
        )

    def flows(self, *, together: Sequence[int], smallest_share: float = 0.0) -> Flows:
        """Splits the needs of rollout ranks into flows, ordered by (source, members).

        Args:
            together: a number for each rollout rank; ranks that need the same box and have the same number
                form one set.
            smallest_share: sets that share less than this fraction of all bytes are split into single ranks.
        """
        sets = list(self.sets.values())
        volumes = [sum(self.groups[need][0][1].box.volume for need in needs) for needs in sets]
        members = _members(list(self.sets), self.class_of, together)
        members = _split_small(members, volumes, smallest_share)
        flows = _flows(self.cover, sets, members)
        return Flows(demand=self, sets=sets, flows=flows)


@dataclass(frozen=True, kw_only=True, eq=False)
class Flows:
    """All flows of a plan, ordered by (source, members).

    The content of a flow is looked up only for a rank's own flows, because there are many others.

    Attributes:
        sets: groups of needs (indices) that the same classes have.
        flows: the flows.
    """

    demand: Demand
    sets: list[list[int]]
    flows: list[Flow]

    @property
    def cover(self) -> Cover:
        """Says which learner rank supplies which part of each need."""
        return self.demand.cover

    @cached_property
    def _cargo(self) -> dict[tuple[int, ...], Cargo]:
        return {}

    def cargo(self, flow: Flow) -> Cargo:
        """Returns a flow's cargo, in the tensors' order."""
        if flow.content not in self._cargo:
            self._cargo[flow.content] = self._load(flow)
        return self._cargo[flow.content]

    def _load(self, flow: Flow) -> Cargo:
        numbers = np.sort(np.array([need for number in flow.content[1:] for need in self.sets[number]]))
        numbers = numbers[np.argsort(self.demand.order[numbers], kind="stable")]
        regions = [self.cover.regions[number] for number in numbers.tolist()]
        rows = [cut.rows_of(flow.source) for cut in regions]
        pairs = list(zip(regions, rows, strict=True))
        box = np.concatenate([cut.box[own] for cut, own in pairs])
        return Cargo(
            need=np.repeat(numbers, [len(own) for own in rows]),
            box=box,
            part=np.concatenate([cut.part[own] for cut, own in pairs]),
            volume=self.cover.boxes.volumes()[box],
        )

    def slice_of(self, need: int, rank: int) -> TensorSlice:
        """Returns the slice in which a rollout rank stores a need."""
        own = self.demand.class_of[rank]
        for number, part in self.demand.groups[need]:
            if number == own:
                return part
        raise KeyError(f"rollout rank {rank} does not have need {need}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunks:
    """A flow's cargo, cut into chunks that fit into messages, as columns.

    Attributes:
        item: index of the flow's box to which a chunk belongs.
        box, volume: the chunk's index in the table of boxes, and its number of elements.
        number: number of the message within the flow.
        offset: the chunk's first element within the flow's part of the message.
    """

    item: IntArray
    box: IntArray
    volume: IntArray
    number: IntArray
    offset: IntArray


def _flows(cover: Cover, sets: Sequence[Sequence[int]], members: Sequence[Sequence[Members]]) -> list[Flow]:
    """Adds up volumes by set and source, and makes the flows."""
    num_sources = len(cover.sharding)
    row_volumes = cover.boxes.row_volumes()
    volumes = np.zeros((len(sets), num_sources), dtype=np.int64)
    longest = np.zeros((len(sets), num_sources), dtype=np.int64)
    for number, needs in enumerate(sets):
        regions = {id(cover.regions[need]): cover.regions[need] for need in needs}
        counts = Counter(id(cover.regions[need]) for need in needs)
        for key, cut in regions.items():
            volumes[number] += counts[key] * cut.volumes
            np.maximum.at(longest[number], cut.source, row_volumes[cut.box])
    sets_of: dict[Members, list[int]] = {}
    for number, several in enumerate(members):
        for ranks in several:
            sets_of.setdefault(ranks, []).append(number)
    contents: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    flows = []
    for ranks in sorted(sets_of):
        own = tuple(sets_of[ranks])
        if own not in contents:
            sums, rows = volumes[list(own)].sum(axis=0), longest[list(own)].max(axis=0)
            contents[own] = list(zip(sums.tolist(), rows.tolist(), strict=True))
        flows += [
            Flow(source=source, members=ranks, volume=volume, longest_row=row, content=(source, *own))
            for source, (volume, row) in enumerate(contents[own])
            if volume
        ]
    return sorted(flows, key=lambda flow: flow.source)


def cut_flow(cargo: Cargo, size: int, boxes: BoxTable) -> Chunks:
    """Cuts a flow into chunks of at most `size` elements, along rows, and fills messages with them.

    Boxes that fit uncut (nearly all) are placed in one step per message.
    """
    ends: list[int] = np.cumsum(cargo.volume).tolist()
    numbers: list[int] = cargo.box.tolist()
    # Runs of boxes that follow each other in one message: first item, count, part or -1, number, offset.
    runs: list[tuple[int, int, int, int, int]] = []
    at, number, filled, before = 0, 0, 0, 0
    while at < len(ends):
        until = bisect_right(ends, before + size - filled, at)
        if until > at:
            runs.append((at, until - at, -1, number, filled))
            filled += ends[until - 1] - before
        else:
            stack = [boxes.boxes[numbers[at]]]
            while stack:
                fit, rest = take_leading(stack.pop(), size - filled, can_wait=filled > 0)
                stack += reversed(rest)
                if fit is None:
                    number, filled = number + 1, 0
                else:
                    runs.append((at, 1, boxes.add(fit), number, filled))
                    filled += fit.volume
            until = at + 1
        at, before = until, ends[until - 1]
    return _expand(cargo, np.array(runs, dtype=np.int64), boxes)


def _expand(cargo: Cargo, runs: IntArray, boxes: BoxTable) -> Chunks:
    """Expands rows per run into rows per chunk."""
    first, count, part, number, offset = runs.T
    run = np.repeat(np.arange(len(runs)), count)
    item = first[run] + np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)
    starts = np.cumsum(cargo.volume) - cargo.volume
    volume = cargo.volume[item]
    cut = np.flatnonzero(part[run] >= 0)
    volume[cut] = [boxes.boxes[box].volume for box in part[run][cut].tolist()]
    return Chunks(
        item=item,
        box=np.where(part[run] >= 0, part[run], cargo.box[item]),
        volume=volume,
        number=number[run],
        offset=offset[run] + starts[item] - starts[first[run]],
    )


def take_leading(box: Box, room: int, *, can_wait: bool) -> tuple[Box | None, list[Box]]:
    """Cuts the leading part that fits into `room` elements off a box; returns it and the rest.

    The part consists of complete rows if at least one fits. If none fits, a box that `can_wait` for an empty
    message is not cut; otherwise the row is cut along the next dimension.
    """
    volume = box.volume
    if volume <= room:
        return box, []
    for dim, extent in enumerate(box.shape):
        row = volume // extent
        if row <= room:
            fit, rest = box.split(dim, box.start[dim] + room // row)
            return fit, [rest]
        if can_wait:
            return None, [box]
        first, others = box.split(dim, box.start[dim] + 1)
        if others.volume:
            fit_first, rest_first = take_leading(first, room, can_wait=False)
            return fit_first, [*rest_first, others]
    raise AssertionError("a box of one element is larger than a round, which build_plan refuses")


def _group_needs(classes: Sequence[RankLayout], apart: Sequence[int]) -> list[Group]:
    """Returns every needed box with the classes that need it, separately for each number in `apart`."""
    groups: dict[tuple[object, ...], Group] = {}
    for number, layout in enumerate(classes):
        times: dict[tuple[str, Box], int] = {}
        for part in layout.slices:
            # A rank may need the same box in two places.
            again = times[part.name, part.box] = times.get((part.name, part.box), 0) + 1
            key = (part.name, part.global_shape, part.box, again, apart[number])
            groups.setdefault(key, []).append((number, part))
    return list(groups.values())


def _members(
    sets: Sequence[tuple[int, ...]], class_of: Sequence[int], together: Sequence[int]
) -> list[list[Members]]:
    """Returns the ranks of each set of classes, grouped by their number in `together`."""
    members: list[list[Members]] = []
    for classes in sets:
        ranks: dict[int, list[int]] = {}
        for rank, number in enumerate(class_of):
            if number in classes:
                ranks.setdefault(together[rank], []).append(rank)
        members.append([tuple(several) for several in ranks.values()])
    return members


def _split_small(
    members: list[list[Members]], volumes: Sequence[int], smallest_share: float
) -> list[list[Members]]:
    """Returns the ranks of each set; sets that share too few bytes are split into single ranks."""
    common: dict[Members, int] = {}
    for several, volume in zip(members, volumes, strict=True):
        for ranks in several:
            common[ranks] = common.get(ranks, 0) + volume
    least = smallest_share * sum(common.values())
    return [
        [
            part
            for ranks in several
            for part in ([ranks] if common[ranks] >= least else [(rank,) for rank in ranks])
        ]
        for several in members
    ]
