"""Flows: what one learner rank sends to one set of rollout ranks with equal needs, cut into chunks.

A set of one rank is served directly. In a larger set each chunk goes to one member, in turn, which then
relays it
to the others: every byte leaves the learners once per set, and the members share the relaying.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.cover import Need, assign_sources
from paceline.weights.geometry.layout import RankLayout, TensorSlice

SMALLEST_SHARE: Final = 0.02
"""A set that has less than this share of all bytes in common gets no messages of its own"""

Members = tuple[int, ...]
"""Rollout ranks, ascending"""

_Group = list[tuple[int, TensorSlice]]
"""Rollout ranks that need the same box, ascending, each with its slice"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cargo:
    """A box of tensor number `order`: read from `source_slice`, written by member i to `targets[i]`."""

    order: int
    box: Box
    source_slice: TensorSlice
    targets: tuple[TensorSlice, ...]


@dataclass(slots=True, kw_only=True)
class Flow:
    """What learner rank `source` sends to `members`, in the tensors' order."""

    source: int
    members: Members
    cargo: list[Cargo] = field(default_factory=list)

    @property
    def volume(self) -> int:
        """Elements, each counted once."""
        return sum(item.box.volume for item in self.cargo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of a flow's cargo that fits into one message.

    Attributes:
        member: index of the member that receives it first.
        round: of that first message.
        offset: the chunk's first element in that message, as far as this flow fills it.
        cargo: what it is a part of.
        box: the part.
    """

    member: int
    round: int
    offset: int
    cargo: Cargo
    box: Box


def gather_flows(
    sources: Sequence[RankLayout],
    destinations: Sequence[RankLayout],
    order: dict[str, int],
    *,
    shared: bool,
    smallest_share: float = 0.0,
) -> list[Flow]:
    """Splits what rollout ranks need into flows, ordered by (source, members).

    Args:
        destinations: what each rollout rank needs; layouts of the general path must have been expanded.
        order: number of each tensor.
        shared: put ranks that need the same box into one set; otherwise each rank is a set of its own.
        smallest_share: sets that have less than this share of all bytes in common are split into single
            ranks.

    Raises:
        WeightSyncError: no source holds a needed part.
    """
    groups = _split_small(_group_needs(destinations, shared=shared), smallest_share)
    needs = [
        Need(
            name=part.name,
            global_shape=part.global_shape,
            box=part.box,
            label=" and ".join(f"rollout rank {rank}" for rank, _ in group),
        )
        for group in groups
        for part in (group[0][1],)
    ]
    flows: dict[tuple[int, Members], Flow] = {}
    for supply in assign_sources(sources, needs):
        group = groups[supply.need]
        members, targets = tuple(rank for rank, _ in group), tuple(part for _, part in group)
        flow = flows.setdefault((supply.source, members), Flow(source=supply.source, members=members))
        number = order[targets[0].name]
        flow.cargo.append(
            Cargo(order=number, box=supply.box, source_slice=supply.source_slice, targets=targets)
        )
    for flow in flows.values():
        flow.cargo.sort(key=lambda item: (item.order, item.box))
    return [flows[key] for key in sorted(flows)]


def deal(flow: Flow, size: int) -> Iterator[Chunk]:
    """Cuts a flow into chunks of at most `size` elements, along rows; deals them to its members in turn."""
    number, filled, count = 0, 0, len(flow.members)
    for item in flow.cargo:
        stack = [item.box]
        while stack:
            box = stack.pop()
            fit, rest = take_leading(box, size - filled, can_wait=filled > 0)
            stack += reversed(rest)
            if fit is None:
                number, filled = number + 1, 0
                continue
            # Each source begins with another member: this spreads the remainders of the last round.
            member = (number + flow.source) % count
            yield Chunk(member=member, round=number // count, offset=filled, cargo=item, box=fit)
            filled += fit.volume


def take_leading(box: Box, room: int, *, can_wait: bool) -> tuple[Box | None, list[Box]]:
    """Cuts off the leading part of a box that fits into `room` elements; returns it and the rest.

    The part consists of complete rows if at least one fits. If none does, nothing is taken if the box
    `can_wait` for an empty message; otherwise the row itself is cut, along the next dimension.
    """
    if box.volume <= room:
        return box, []
    for dim, extent in enumerate(box.shape):
        row = box.volume // extent
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


def _group_needs(destinations: Sequence[RankLayout], *, shared: bool) -> list[_Group]:
    """Every needed box with the ranks that need it; if not `shared`, a group per rank."""
    groups: dict[tuple[object, ...], _Group] = {}
    for rank, layout in enumerate(destinations):
        times: dict[tuple[str, Box], int] = {}
        for part in layout.slices:
            # A rank may need the same box in two places.
            number = times[part.name, part.box] = times.get((part.name, part.box), 0) + 1
            key = (part.name, part.global_shape, part.box, number, -1 if shared else rank)
            groups.setdefault(key, []).append((rank, part))
    return list(groups.values())


def _split_small(groups: list[_Group], smallest_share: float) -> list[_Group]:
    """The groups; those of sets that have too little in common are split into single ranks."""
    common: dict[Members, int] = {}
    for group in groups:
        members = tuple(rank for rank, _ in group)
        common[members] = common.get(members, 0) + group[0][1].box.volume
    least = smallest_share * sum(common.values())
    split: list[_Group] = []
    for group in groups:
        small = common[tuple(rank for rank, _ in group)] < least
        split += [[member] for member in group] if small else [group]
    return split
