"""The transfer plan piece by piece, as it was first written: slow, simple, to compare the real one with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from paceline.core.errors import WeightSyncError
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, TensorSlice, expand_full, tensor_shapes
from paceline.weights.plan.flows import take_leading
from paceline.weights.plan.plan import MessageKey, Piece

RELAY_MODES: Final = ("auto", "never", "always")
_ROUND_COST_BYTES: Final = 64 << 20


@dataclass(frozen=True, kw_only=True)
class NaivePlan:
    """All pieces of a push: those that learners send, by (source, members), then those that are relayed.

    A relay passes on everything that it received over one channel in a round, in the same order: learner by
    learner.
    """

    num_sources: int
    num_destinations: int
    num_rounds: int
    num_channels: int
    item_bytes: int
    pieces: tuple[Piece, ...]

    @cached_property
    def message_sizes(self) -> dict[MessageKey, int]:
        """Number of elements of every message; there are no empty ones."""
        sizes: dict[MessageKey, int] = {}
        for piece in self.pieces:
            key = self.message_of(piece)
            sizes[key] = sizes.get(key, 0) + piece.box.volume
        return sizes

    def message_of(self, piece: Piece) -> MessageKey:
        """The message that carries a piece."""
        sender = piece.source if piece.relay is None else self.num_sources + piece.relay
        return MessageKey(sender, self.num_sources + piece.destination, piece.round, piece.channel)

    def sent_bytes(self, source: int) -> int:
        """Bytes that leave this learner rank in a push."""
        return self._bytes(key for key in self.message_sizes if key.sender == source)

    def received_bytes(self, destination: int) -> int:
        """Bytes that reach this rollout rank in a push."""
        rank = self.num_sources + destination
        return self._bytes(key for key in self.message_sizes if key.receiver == rank)

    def relayed_bytes(self, destination: int) -> int:
        """Bytes that this rollout rank relays in a push."""
        rank = self.num_sources + destination
        return self._bytes(key for key in self.message_sizes if key.sender == rank)

    @cached_property
    def cost_bytes(self) -> int:
        """How long a push takes, in bytes over one link.

        A round lasts as long as its busiest rank sends or receives.
        """
        loads: dict[tuple[int, int, bool], int] = {}
        for key, size in self.message_sizes.items():
            for end in ((key.round, key.sender, True), (key.round, key.receiver, False)):
                loads[end] = loads.get(end, 0) + size * self.item_bytes
        busiest = [0] * self.num_rounds
        for (number, _, _), load in loads.items():
            busiest[number] = max(busiest[number], load)
        return sum(busiest) + _ROUND_COST_BYTES * self.num_rounds

    def _bytes(self, keys: Iterable[MessageKey]) -> int:
        return self.item_bytes * sum(self.message_sizes[key] for key in keys)


def naive_plan(
    sources: Sequence[RankLayout],
    destinations: Sequence[RankLayout],
    *,
    item_bytes: int,
    round_bytes: int,
    relay: str = "never",
) -> NaivePlan:
    """Intersects what learner ranks hold with what rollout ranks need.

    Args:
        sources: one layout per learner rank.
        destinations: one layout per rollout rank; those of the general path are expanded to every tensor.
        item_bytes: bytes per element on the wire.
        round_bytes: most bytes that any rank packs in one round, or receives in one from learners and relays.
        relay: whether rollout ranks that need the same box relay it to each other. "auto": if that is faster,
            by `cost_bytes`; "always": whenever two need the same box, for tests.

    Raises:
        WeightSyncError: no source holds a needed part, no destination needs a tensor, two slices are written
            to the same place, or a round is too small for one element.
    """
    if relay not in RELAY_MODES:
        raise ValueError(f"relay {relay!r} is none of {', '.join(RELAY_MODES)}")
    capacity = round_bytes // item_bytes
    if capacity < 1:
        raise WeightSyncError(f"round_bytes is {round_bytes}; it must hold at least one element")
    shapes = tensor_shapes([*sources, *destinations])
    learner_shapes = tensor_shapes(sources)
    destinations = [expand_full(layout, learner_shapes) for layout in destinations]
    order = {name: index for index, name in enumerate(shapes)}

    def plan(*, shared: bool, smallest_share: float = 0.0) -> NaivePlan:
        flows = gather_flows(sources, destinations, order, shared=shared, smallest_share=smallest_share)
        return _plan_flows(flows, len(sources), len(destinations), item_bytes, capacity)

    if relay == "always":
        return plan(shared=True)
    direct = plan(shared=False)
    if relay == "never" or not _egress_binds(direct):
        return direct
    relayed = plan(shared=True, smallest_share=SMALLEST_SHARE)
    return relayed if relayed.cost_bytes < direct.cost_bytes else direct


def _egress_binds(plan: NaivePlan) -> bool:
    """Whether some learner rank sends more than any rollout rank receives: relaying helps only then."""
    sent = max((plan.sent_bytes(source) for source in range(plan.num_sources)), default=0)
    return sent > max((plan.received_bytes(rank) for rank in range(plan.num_destinations)), default=0)


def _plan_flows(
    flows: Sequence[Flow], num_sources: int, num_destinations: int, item_bytes: int, capacity: int
) -> NaivePlan:
    """Assigns its message to every chunk, and to chunks of larger sets also the messages that relay them."""
    sets = sorted({flow.members for flow in flows if len(flow.members) > 1})
    channels = {members: 1 + index for index, members in enumerate(sets)}
    sent: list[Piece] = []
    relayed: list[Piece] = []
    # Elements of earlier sources that come first in what a relay passes on.
    before: dict[tuple[int, int, int], int] = {}
    for flow, size in zip(flows, chunk_sizes(flows, capacity), strict=True):
        channel = channels.get(flow.members, 0)
        filled: dict[tuple[int, int, int], int] = {}
        for chunk in deal(flow, size):
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
                (sent if direct else relayed).append(piece)
            filled[place] = filled.get(place, 0) + chunk.box.volume
        for place, size in filled.items():
            before[place] = before.get(place, 0) + size
    pieces = (*sent, *relayed)
    return NaivePlan(
        num_sources=num_sources,
        num_destinations=num_destinations,
        num_rounds=max((piece.round + 1 for piece in pieces), default=0),
        num_channels=1 + len(sets),
        item_bytes=item_bytes,
        pieces=pieces,
    )


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


def naive_assign(sources: Sequence[RankLayout], needs: Sequence[Need]) -> list[Supply]:
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
    for supply in naive_assign(sources, needs):
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


_LEAST_ROUNDS: Final = 4
"""In a single round, packing, sending and scattering could not overlap"""

_WORTH_A_ROUND: Final = 16 << 20
"""Elements of the busiest rank from which on another round costs less than it hides"""

_ALIGNED: Final = 8
"""A chunk's size is a multiple of this: parts then begin at addresses that kernels copy at full speed"""

_End = tuple[str, int]
"""A rank's part in flows: ("source" or "member", its index)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What one member takes of a flow, in elements.

    Attributes:
        volume: in all.
        limit: at most this much per round.
        least: at least this much at a time, even if less would be enough.
        slack: by so much a chunk may fall short, since it ends at a row's end and at an aligned size.
    """

    volume: int
    limit: int
    least: int
    slack: int

    @property
    def num_rounds(self) -> int:
        """Number of rounds that is certainly enough."""
        sure = self.limit - self.slack if self.limit > 2 * self.slack else self.limit
        return -(-self.volume // sure)

    def chunk_size(self, num_rounds: int) -> int:
        """Largest chunk with which the flow ends after about this many rounds."""
        size = min(self.limit, max(self.least, -(-self.volume // num_rounds) + self.slack))
        return max(size // _ALIGNED * _ALIGNED, min(size, _ALIGNED))


def chunk_sizes(flows: Sequence[Flow], capacity: int) -> list[int]:
    """Largest chunk of each flow, in elements.

    Every flow is spread over all rounds, so that each round moves about as much as any other and keeps all
    links busy. In a round a rank packs at most `capacity` elements, and receives at most as many from
    learners and relays together. Its flows share a sixteenth of that equally, so that small flows are not cut
    to bits, and the rest in proportion to their volumes. Of a shared flow every member takes one chunk per
    round.
    """
    loads = _loads(flows)
    shares = [_share(flow, [loads[end] for end in _ends(flow)], capacity) for flow in flows]
    busiest = max((sum(load.values()) for load in loads.values()), default=0)
    num_rounds = max(
        [1, min(_LEAST_ROUNDS, busiest // _WORTH_A_ROUND), *(share.num_rounds for share in shares)]
    )
    return [share.chunk_size(num_rounds) for share in shares]


def _share(flow: Flow, loads: Sequence[dict[object, int]], capacity: int) -> _Share:
    evenly, count = capacity // 16, len(flow.members)
    least = evenly // max(map(len, loads))
    by_volume = min((capacity - evenly) * flow.volume // sum(load.values()) for load in loads)
    return _Share(
        volume=-(-flow.volume // count),
        limit=max(1, (least + by_volume) // count),
        least=least // count,
        slack=max(item.box.volume // item.box.shape[0] for item in flow.cargo) + _ALIGNED,
    )


def _ends(flow: Flow) -> list[_End]:
    return [("source", flow.source), *(("member", rank) for rank in flow.members)]


def _loads(flows: Sequence[Flow]) -> dict[_End, dict[object, int]]:
    """What each rank packs or receives: elements by flow.

    Flows of the same cargo, to replicas that are served one by one, are packed once.
    """
    loads: dict[_End, dict[object, int]] = {}
    for number, flow in enumerate(flows):
        cargo = tuple((item.order, item.box) for item in flow.cargo)
        for end in _ends(flow):
            loads.setdefault(end, {})[cargo if end[0] == "source" else number] = flow.volume
    return loads
