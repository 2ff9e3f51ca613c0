"""The transfer plan piece by piece: a slow, simple reference for the planner that works on columns.

It cuts the needs into regions, assigns contested parts, deals chunks and lists the pieces by itself. The
groups of needs, the sizes of chunks and the cut of one box come from the planner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.cover import Need, Supply
from paceline.weights.geometry.layout import RankLayout, TensorSlice, expand_all, tensor_shapes
from paceline.weights.plan.chunks import take_leading
from paceline.weights.plan.flows import SMALLEST_SHARE, Members
from paceline.weights.plan.messages import MessageKey
from paceline.weights.plan.rounds import chunk_sizes
from support.plan_pieces import Piece

_ROUND_COST_BYTES = 64 << 20
_SMALLEST_SPLIT = 1 << 14

_Holder = tuple[int, TensorSlice]
"""A source's number, and its slice that contains a box"""


@dataclass(frozen=True, kw_only=True)
class NaivePlan:
    """All pieces of a push: those that learners send, by (source, members), then those that are relayed."""

    num_sources: int
    num_destinations: int
    num_channels: int
    item_bytes: int
    flows: list[NaiveFlow]
    sizes: list[int]
    sets: list[Members]

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All of them, in order."""
        return _pieces(self.flows, self.sizes, self.sets)

    @property
    def num_rounds(self) -> int:
        """One more than the last round."""
        return max((piece.round + 1 for piece in self.pieces), default=0)

    @cached_property
    def message_sizes(self) -> dict[MessageKey, int]:
        """Number of elements of every message."""
        sizes: dict[MessageKey, int] = {}
        for piece in self.pieces:
            sender = piece.source if piece.relay is None else self.num_sources + piece.relay
            key = MessageKey(sender, self.num_sources + piece.destination, piece.round, piece.channel)
            sizes[key] = sizes.get(key, 0) + piece.box.volume
        return sizes

    @property
    def cost_bytes(self) -> int:
        """The load of the busiest rank, and what rounds cost; members of a set share what they relay."""
        loads: Counter[tuple[str, int]] = Counter()
        rounds = 0
        for flow, size in zip(self.flows, self.sizes, strict=True):
            count = len(flow.members)
            rounds = max(rounds, -(-flow.volume // (size * count)) + (count > 1))
            loads["sends", flow.source] += flow.volume
            for member in flow.members:
                loads["receives", member] += flow.volume
        for members in {flow.members for flow in self.flows}:
            volume = sum(flow.volume for flow in self.flows if flow.members == members)
            for member in members:
                loads["relays", member] += volume * (len(members) - 1) // len(members)
        return self.item_bytes * max(loads.values(), default=0) + _ROUND_COST_BYTES * rounds

    @property
    def egress_binds(self) -> bool:
        """Whether some learner rank sends more than any rollout rank receives."""
        sent, received = [0] * self.num_sources, [0] * self.num_destinations
        for piece in self.pieces:
            received[piece.destination] += piece.box.volume
            if piece.relay is None:
                sent[piece.source] += piece.box.volume
        return max(sent) > max(received)


def naive_plan(
    sources: Sequence[RankLayout],
    destinations: Sequence[RankLayout],
    *,
    item_bytes: int,
    round_bytes: int,
    relay: str = "never",
) -> NaivePlan:
    """What `build_plan` makes of the same arguments, for ranks of one node."""
    order = {name: index for index, name in enumerate(tensor_shapes([*sources, *destinations]))}
    destinations = expand_all(destinations, tensor_shapes(sources))

    def plan(*, shared: bool, smallest_share: float = 0.0) -> NaivePlan:
        together = [0] * len(destinations) if shared else range(len(destinations))
        flows = naive_flows(sources, destinations, together, smallest_share, order)
        sets = sorted({flow.members for flow in flows if len(flow.members) > 1})
        return NaivePlan(
            num_sources=len(sources),
            num_destinations=len(destinations),
            num_channels=1 + len(sets),
            item_bytes=item_bytes,
            flows=flows,
            sizes=chunk_sizes(flows, round_bytes // item_bytes),
            sets=sets,
        )

    if relay == "always":
        return plan(shared=True)
    direct = plan(shared=False)
    if relay == "never" or not direct.egress_binds:
        return direct
    relayed = plan(shared=True, smallest_share=SMALLEST_SHARE)
    return relayed if relayed.cost_bytes < direct.cost_bytes else direct


def _pieces(flows: Sequence[NaiveFlow], sizes: Sequence[int], sets: Sequence[Members]) -> tuple[Piece, ...]:
    """Assigns its message to every chunk, and to chunks of larger sets also the messages that relay them."""
    channels = {members: 1 + index for index, members in enumerate(sets)}
    sent: list[Piece] = []
    relayed: list[Piece] = []
    # Elements of earlier sources that come first in what a relay passes on.
    before: dict[tuple[int, int, int], int] = {}
    for flow, size in zip(flows, sizes, strict=True):
        channel = channels.get(flow.members, 0)
        passed_on: list[tuple[tuple[int, int], Piece]] = []
        filled: dict[tuple[int, int, int], int] = {}
        for chunk in cut(flow, size):
            first_member = flow.members[chunk.member]
            place = (first_member, chunk.round, channel)
            for index, rank in enumerate(flow.members):
                part, direct = chunk.cargo.targets[index], rank == first_member
                piece = Piece(
                    source=flow.source,
                    relay=None if direct else first_member,
                    destination=rank,
                    round=chunk.round + (not direct),
                    channel=channel,
                    offset=chunk.offset + (0 if direct else before.get(place, 0)),
                    name=part.name,
                    box=chunk.box,
                    source_param=chunk.cargo.source_slice.param,
                    source_box=chunk.cargo.source_slice.to_local(chunk.box),
                    destination_param=part.param,
                    destination_box=part.to_local(chunk.box),
                )
                if direct:
                    sent.append(piece)
                else:
                    passed_on.append(((chunk.number, rank), piece))
            filled[place] = filled.get(place, 0) + chunk.box.volume
        relayed += [piece for _, piece in sorted(passed_on, key=lambda item: item[0])]
        for place, size in filled.items():
            before[place] = before.get(place, 0) + size
    return (*sent, *relayed)


def naive_assign(sources: Sequence[RankLayout], needs: Sequence[Need]) -> list[Supply]:
    """Splits every need among the sources that hold it, as `assign_sources` describes."""
    by_name: dict[str, list[_Holder]] = {}
    for source, layout in enumerate(sources):
        for part in layout.slices:
            by_name.setdefault(part.name, []).append((source, part))
    supplies: list[Supply] = []
    load = [0] * len(sources)
    contested: list[tuple[int, Box, list[_Holder]]] = []
    for index, need in enumerate(needs):
        for box, owners in _regions(need, by_name[need.name]):
            if len(owners) > 1:
                contested += [(index, part, owners) for part in _cut(box, len(owners))]
            else:
                source, part = owners[0]
                supplies.append(Supply(need=index, source=source, source_slice=part, box=box))
                load[source] += need.copies * box.volume
    contested.sort(key=lambda item: (-item[1].volume, item[0], item[1]))
    for index, box, owners in contested:
        source, part = min(owners, key=lambda owner: (load[owner[0]], (owner[0] - index) % len(sources)))
        supplies.append(Supply(need=index, source=source, source_slice=part, box=box))
        load[source] += needs[index].copies * box.volume
    supplies.sort(key=lambda item: (item.need, item.box, item.source))
    return supplies


def _regions(need: Need, holders: list[_Holder]) -> list[tuple[Box, list[_Holder]]]:
    """Cuts the need into disjoint boxes, each with all sources that hold it completely."""
    pending: list[Box] = [need.box] if need.box.volume else []
    regions: list[tuple[Box, list[_Holder]]] = []
    while pending:
        box = pending.pop()
        first = next(common for _, part in holders if (common := part.box.intersect(box)))
        # Another holder's border may cut through this box: shrink it until each holds all of it or nothing.
        for _, part in holders:
            first = part.box.intersect(first) or first
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cargo:
    """A box of tensor number `order`: read from `source_slice`, written by member i to `targets[i]`."""

    order: int
    need: int
    box: Box
    source_slice: TensorSlice
    targets: tuple[TensorSlice, ...]


@dataclass(kw_only=True)
class NaiveFlow:
    """What learner rank `source` sends to `members`, in the tensors' order; to `chunk_sizes` a Flow."""

    source: int
    members: Members
    needs: list[int]
    cargo: list[Cargo] = field(default_factory=list)

    @cached_property
    def volume(self) -> int:
        """Elements, each counted once."""
        return sum(item.box.volume for item in self.cargo)

    @cached_property
    def longest_row(self) -> int:
        """Elements of the longest row."""
        return max(item.box.volume // item.box.shape[0] for item in self.cargo)

    @cached_property
    def content(self) -> tuple[object, ...]:
        """Equal for flows from the same source to members that need the same, whoever else supplies it."""
        return self.source, *self.needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part `box` of a flow's cargo that fits into one message.

    Attributes:
        member: index of the member that receives it first.
        number: of the message, counted within the flow.
        round: of that first message.
        offset: the chunk's first element in that message, as far as this flow fills it.
    """

    member: int
    number: int
    round: int
    offset: int
    cargo: Cargo
    box: Box


def naive_flows(
    sources: Sequence[RankLayout],
    destinations: Sequence[RankLayout],
    together: Sequence[int],
    smallest_share: float,
    order: dict[str, int],
) -> list[NaiveFlow]:
    """Assigns each needed box; sets of ranks that need it get the same. Ordered by (source, members)."""
    needed: dict[tuple[object, ...], dict[int, TensorSlice]] = {}
    for rank, layout in enumerate(destinations):
        times: Counter[tuple[str, Box]] = Counter()
        for part in layout.slices:
            times[part.name, part.box] += 1
            key = (part.name, part.box, times[part.name, part.box])
            needed.setdefault(key, {})[rank] = part
    parts = [next(iter(targets.values())) for targets in needed.values()]
    needs = [
        Need(
            name=part.name,
            global_shape=part.global_shape,
            box=part.box,
            label="",
            copies=len(targets),
        )
        for part, targets in zip(parts, needed.values(), strict=True)
    ]
    sets_of = sets_of_members(list(needed.values()), together, smallest_share)
    needs_of: dict[Members, list[int]] = {}
    for number, sets in enumerate(sets_of):
        for members in sets:
            needs_of.setdefault(members, []).append(number)
    flows: dict[tuple[int, Members], NaiveFlow] = {}
    for supply in naive_assign(sources, needs):
        targets = list(needed.values())[supply.need]
        for members in sets_of[supply.need]:
            flow = flows.setdefault(
                (supply.source, members),
                NaiveFlow(source=supply.source, members=members, needs=needs_of[members]),
            )
            flow.cargo.append(
                Cargo(
                    order=order[parts[supply.need].name],
                    need=supply.need,
                    box=supply.box,
                    source_slice=supply.source_slice,
                    targets=tuple(targets[rank] for rank in members),
                )
            )
    for flow in flows.values():
        flow.cargo.sort(key=lambda item: (item.order, item.need, item.box))
    return [flows[key] for key in sorted(flows)]


def sets_of_members(
    needed: Sequence[dict[int, TensorSlice]], together: Sequence[int], smallest_share: float
) -> list[list[Members]]:
    """Of each need the sets of ranks that get it as one; sets with too small a share are taken apart."""
    groups: list[list[Members]] = []
    common: Counter[Members] = Counter()
    for targets in needed:
        numbers = dict.fromkeys(together[rank] for rank in targets)
        groups.append([tuple(r for r in targets if together[r] == number) for number in numbers])
        for members in groups[-1]:
            common[members] += next(iter(targets.values())).box.volume
    least = smallest_share * sum(common.values())
    split = [
        [[several] if common[several] >= least else [(rank,) for rank in several] for several in sets]
        for sets in groups
    ]
    return [[members for part in parts for members in part] for parts in split]


def cut(flow: NaiveFlow, size: int) -> Iterator[Chunk]:
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
            yield Chunk(
                member=member,
                number=number,
                round=number // count,
                offset=filled,
                cargo=item,
                box=fit,
            )
            filled += fit.volume
