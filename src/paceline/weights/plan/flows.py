"""Flows: all that one learner rank has for one set of rollout ranks that need the same, dealt out in chunks.

A set of one rank is served directly. In a larger set each chunk goes to one member, in turn, which later passes it on to the
others: so every byte leaves the learners once per set, and the members share the passing on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.cover import Need, assign_sources
from paceline.weights.geometry.layout import RankLayout, TensorSlice

SMALLEST_SHARE: Final = 0.02
"""Share of all bytes below which what a set has in common is not worth messages of its own"""

Members = tuple[int, ...]
"""Rollout ranks, ascending"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cargo:
    """A box of tensor number `order`, out of what the sender holds; `wanted` are the members' slices that take it."""

    order: int
    box: Box
    held: TensorSlice
    wanted: tuple[TensorSlice, ...]


@dataclass(slots=True, kw_only=True)
class Flow:
    """What learner rank `source` has for `members`, in the tensors' order."""

    source: int
    members: Members
    cargo: list[Cargo] = field(default_factory=list)

    @property
    def volume(self) -> int:
        """Elements, counted once."""
        return sum(item.box.volume for item in self.cargo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of a flow's `cargo` that fits one message: the `member`th takes it first, in `round`, `offset` elements in."""

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
        destinations: what each rollout rank needs; none of them `whole`.
        order: number of each tensor.
        shared: put ranks that need the same box into one set; otherwise each is a set of its own.
        smallest_share: sets that have less than this share of all bytes in common are taken apart.

    Raises:
        WeightSyncError: a needed part is held by nobody.
    """
    wanted: dict[tuple[object, ...], list[tuple[int, TensorSlice]]] = {}
    for rank, layout in enumerate(destinations):
        times: dict[tuple[str, Box], int] = {}
        for part in layout.slices:
            # A rank may want the same box in two places.
            number = times[part.name, part.box] = times.get((part.name, part.box), 0) + 1
            key = (part.name, part.global_shape, part.box, number, -1 if shared else rank)
            wanted.setdefault(key, []).append((rank, part))
    groups = _apart(list(wanted.values()), smallest_share)
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
        members, parts = tuple(rank for rank, _ in group), tuple(part for _, part in group)
        flow = flows.setdefault((supply.source, members), Flow(source=supply.source, members=members))
        item = Cargo(order=order[parts[0].name], box=supply.box, held=supply.held, wanted=parts)
        flow.cargo.append(item)
    for flow in flows.values():
        flow.cargo.sort(key=lambda item: (item.order, item.box))
    return [flows[key] for key in sorted(flows)]


def deal(flow: Flow, size: int) -> Iterator[Chunk]:
    """Cuts a flow into chunks of at most `size` elements, along rows, and deals them to its members in turn."""
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
            # Each source begins with another member: the remainders of the last round are then spread.
            member = (number + flow.source) % count
            yield Chunk(member=member, round=number // count, offset=filled, cargo=item, box=fit)
            filled += fit.volume


def take_leading(box: Box, room: int, *, can_wait: bool) -> tuple[Box | None, list[Box]]:
    """Cuts off the leading part of a box that fits into `room` elements, and what is left, in order.

    Whole rows where at least one fits. Where none does, nothing is taken if a fresh message `can_wait`;
    otherwise the row itself is cut, along the next dimension.
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


def _apart(
    groups: list[list[tuple[int, TensorSlice]]], smallest_share: float
) -> list[list[tuple[int, TensorSlice]]]:
    """The groups, those of sets that have too little in common taken apart into single ranks."""
    common: dict[Members, int] = {}
    for group in groups:
        members = tuple(rank for rank, _ in group)
        common[members] = common.get(members, 0) + group[0][1].box.volume
    least = smallest_share * sum(common.values())
    found = []
    for group in groups:
        small = common[tuple(rank for rank, _ in group)] < least
        found += [[one] for one in group] if small else [group]
    return found
