"""Flows: what one learner rank sends to one set of rollout ranks with equal needs, cut into chunks.

A set of one rank is served directly. In a larger set each chunk goes to one member, in turn, which then
relays it to the others: every byte leaves the learners once per set, and the members share the relaying.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from paceline.weights.geometry.box_table import BoxTable, IntArray
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.cover import Cover, Need, assign_sources
from paceline.weights.geometry.layout import RankLayout, TensorSlice

SMALLEST_SHARE: Final = 0.02
"""A set that has less than this share of all bytes in common gets no messages of its own"""

Members = tuple[int, ...]
"""Rollout ranks, ascending"""

Group = list[tuple[int, TensorSlice]]
"""Rollout ranks that need the same box, ascending, each with its slice"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """What learner rank `source` sends to `members`, in the tensors' order.

    Attributes:
        rows: the rows of the cover.
        boxes, volumes: their boxes' numbers, and the elements of each.
        longest_row: elements of the longest row of any of its boxes.
        content: equal for flows of the same tensors' same boxes.
    """

    source: int
    members: Members
    rows: IntArray
    boxes: IntArray
    volumes: IntArray
    longest_row: int
    content: bytes

    @property
    def volume(self) -> int:
        """How many elements flow, each counted once however many receive it."""
        return int(self.volumes.sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flows:
    """All flows of a plan, ordered by (source, members).

    Attributes:
        cover: who supplies what; the flows' rows are rows of it.
        groups: the rollout ranks of each of its needs.
    """

    cover: Cover
    groups: list[Group]
    flows: list[Flow]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunks:
    """A flow's cargo, cut into parts that fit into messages, as columns.

    Attributes:
        item: index among the flow's boxes of the one that a chunk is a part of.
        box, volume: the part's number in the table of boxes, and its elements.
        number: of the message, counted within the flow.
        offset: the chunk's first element in that message, as far as this flow fills it.
    """

    item: IntArray
    box: IntArray
    volume: IntArray
    number: IntArray
    offset: IntArray


def gather_flows(
    sources: Sequence[RankLayout],
    destinations: Sequence[RankLayout],
    order: dict[str, int],
    *,
    together: Sequence[int],
    smallest_share: float = 0.0,
) -> Flows:
    """Splits what rollout ranks need into flows, ordered by (source, members).

    Args:
        destinations: what each rollout rank needs; layouts of the general path must have been expanded.
        order: number of each tensor.
        together: a number for each rollout rank; ranks that need the same box and have the same number form
            one set.
        smallest_share: sets that have less than this share of all bytes in common are split into single
            ranks.

    Raises:
        WeightSyncError: no source holds a needed part.
    """
    groups = _split_small(_group_needs(destinations, together), smallest_share)
    needs = [
        Need(
            name=part.name,
            global_shape=part.global_shape,
            box=part.box,
            label=" and ".join(f"rollout rank {rank}" for rank, _ in group),
            node=nodes.pop() if len(nodes) == 1 else "",
        )
        for group in groups
        for part in (group[0][1],)
        for nodes in ({destinations[rank].place.node for rank, _ in group},)
    ]
    cover = assign_sources(sources, needs)
    members_of = [tuple(rank for rank, _ in group) for group in groups]
    sets = sorted(set(members_of))
    number_of = {members: number for number, members in enumerate(sets)}
    tensor = np.array([order[need.name] for need in needs], dtype=np.int64)[cover.need]
    members = np.array([number_of[members] for members in members_of], dtype=np.int64)[cover.need]
    rows = np.lexsort((cover.boxes.ranks()[cover.box], tensor, members, cover.source))
    keys = np.stack([cover.source[rows], members[rows]])
    starts = np.flatnonzero(np.any(keys[:, 1:] != keys[:, :-1], axis=0)) + 1
    volumes, row_volumes = cover.boxes.volumes(), cover.boxes.row_volumes()

    def flow(part: IntArray) -> Flow:
        boxes = cover.box[part]
        return Flow(
            source=int(cover.source[part[0]]),
            members=sets[members[part[0]]],
            rows=part,
            boxes=boxes,
            volumes=volumes[boxes],
            longest_row=int(row_volumes[boxes].max()),
            content=np.stack([tensor[part], boxes]).tobytes(),
        )

    parts = np.split(rows, starts) if len(rows) else []
    return Flows(cover=cover, groups=groups, flows=[flow(part) for part in parts])


def cut_all(flows: Sequence[Flow], sizes: Sequence[int], boxes: BoxTable) -> list[Chunks]:
    """Cuts each flow into chunks of at most `sizes` elements; flows of the same content are cut once."""
    known: dict[tuple[bytes, int], Chunks] = {}
    chunks: list[Chunks] = []
    for flow, size in zip(flows, sizes, strict=True):
        key = (flow.content, size)
        if key not in known:
            known[key] = _cut(flow, size, boxes)
        chunks.append(known[key])
    return chunks


def _cut(flow: Flow, size: int, boxes: BoxTable) -> Chunks:
    """Cuts a flow into chunks of at most `size` elements, along rows, and fills messages with them.

    What fits as it is, which is nearly all, is placed in one step per message.
    """
    ends: list[int] = np.cumsum(flow.volumes).tolist()
    numbers: list[int] = flow.boxes.tolist()
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
    return _expand(flow, np.array(runs, dtype=np.int64), boxes)


def _expand(flow: Flow, runs: IntArray, boxes: BoxTable) -> Chunks:
    """One row per chunk from one row per run."""
    first, count, part, number, offset = runs.T
    run = np.repeat(np.arange(len(runs)), count)
    item = first[run] + np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)
    starts = np.cumsum(flow.volumes) - flow.volumes
    volume = flow.volumes[item]
    cut = np.flatnonzero(part[run] >= 0)
    volume[cut] = [boxes.boxes[box].volume for box in part[run][cut].tolist()]
    return Chunks(
        item=item,
        box=np.where(part[run] >= 0, part[run], flow.boxes[item]),
        volume=volume,
        number=number[run],
        offset=offset[run] + starts[item] - starts[first[run]],
    )


def take_leading(box: Box, room: int, *, can_wait: bool) -> tuple[Box | None, list[Box]]:
    """Cuts off the leading part of a box that fits into `room` elements; returns it and the rest.

    The part consists of complete rows if at least one fits. If none does, nothing is taken if the box
    `can_wait` for an empty message; otherwise the row itself is cut, along the next dimension.
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


def _group_needs(destinations: Sequence[RankLayout], together: Sequence[int]) -> list[Group]:
    """Every needed box with the ranks that need it and have the same number."""
    groups: dict[tuple[object, ...], Group] = {}
    for rank, layout in enumerate(destinations):
        times: dict[tuple[str, Box], int] = {}
        for part in layout.slices:
            # A rank may need the same box in two places.
            number = times[part.name, part.box] = times.get((part.name, part.box), 0) + 1
            key = (part.name, part.global_shape, part.box, number, together[rank])
            groups.setdefault(key, []).append((rank, part))
    return list(groups.values())


def _split_small(groups: list[Group], smallest_share: float) -> list[Group]:
    """The groups; those of sets that have too little in common are split into single ranks."""
    common: dict[Members, int] = {}
    for group in groups:
        members = tuple(rank for rank, _ in group)
        common[members] = common.get(members, 0) + group[0][1].box.volume
    least = smallest_share * sum(common.values())
    split: list[Group] = []
    for group in groups:
        small = common[tuple(rank for rank, _ in group)] < least
        split += [[member] for member in group] if small else [group]
    return split
