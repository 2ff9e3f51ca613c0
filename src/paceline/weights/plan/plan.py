"""Plans the transfer of every piece in a weight push: its source, relay, destination and round.

The plan is a pure function of the layouts, the element size, the size of a round and the relay mode. Every
rank computes it from the same bytes; the fingerprints are compared when the group forms.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import msgpack
import numpy as np

from paceline.core.errors import WeightSyncError
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, RankPlace, TensorSlice, expand_all
from paceline.weights.geometry.sharding import HeldPart, Sharding
from paceline.weights.plan.collector import collector_paused
from paceline.weights.plan.flows import SMALLEST_SHARE, Chunks, Demand, Flow, Flows, Members, cut_flow
from paceline.weights.plan.rounds import chunk_sizes

RELAY_MODES: Final = ("auto", "never", "always")

PLAN_SCHEMA: Final = 2
"""Raise this when the plan for the same layouts changes, so that ranks of other versions are refused."""

_ROUND_COST_BYTES: Final = 64 << 20
"""Bytes that a link carries in the time it takes to start and end a round (0.2 ms at 350 GB/s)"""

_NETWORK_COST: Final = 8
"""How much longer a byte takes over a node's network (50 GB/s) than over a rank's link (400 GB/s)"""


class MessageKey(NamedTuple):
    """One message between two ranks of the group (learners come first).

    Channel 0 carries elements that nobody relays; each other channel carries the common needs of one set of
    rollout ranks.
    """

    sender: int
    receiver: int
    round: int
    channel: int


class Piece(NamedTuple):
    """One box of one tensor on its way to one destination.

    Attributes:
        source, destination: index among the learner ranks, index among the rollout ranks.
        relay: the rollout rank that received it one round earlier and relays it; None if the source sends it.
        round, channel: round and channel of the message that carries it.
        offset: index of its first element in that message.
        name, box: the tensor, and the part of it in global indices.
        source_param, source_box: where the learner reads it.
        destination_param, destination_box: where the rollout rank writes it.
    """

    source: int
    relay: int | None
    destination: int
    round: int
    channel: int
    offset: int
    name: str
    box: Box
    source_param: str
    source_box: Box
    destination_param: str
    destination_box: Box


ChunkRow = tuple[int, int, int, int]
"""Need, part of the source's kind, number of the box, and offset of a chunk; see `Chunks`"""


class MessagePart(NamedTuple):
    """A flow's part of a message: its chunks `start` to `stop`, beginning at element `lead`."""

    flow: int
    start: int
    stop: int
    lead: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlowChunks:
    """Holds a flow's chunks and its messages.

    Attributes:
        chunks: need, part of the source's kind, number of the box, and offset of each chunk.
        starts: first chunk of each message, followed by the number of chunks.
        sizes: elements of each message.
        rounds, first: round of each message; rollout rank that receives it first.
    """

    chunks: list[ChunkRow]
    starts: list[int]
    sizes: list[int]
    rounds: list[int]
    first: list[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class TransferPlan:
    """Says which piece goes from whom to whom in a push.

    Every rank knows all flows and their chunk sizes. A flow is cut into chunks on request, so a rank cuts
    only its own flows.

    A chunk gives one piece for the member that receives it from the learner, and one for each member to which
    this receiver relays it. A relay passes on everything that it received over a channel in a round, in the
    same order: learner by learner.

    Attributes:
        flows: all flows.
        sizes: largest number of elements in a chunk of each flow.
        layouts: a digest of all layouts.
        nodes: a number for each rank of the group; equal for ranks of one node.
    """

    num_sources: int
    num_destinations: int
    item_bytes: int
    flows: Flows
    sizes: Sequence[int]
    layouts: bytes
    nodes: tuple[int, ...]

    @cached_property
    def channels(self) -> dict[Members, int]:
        """The channel of each set of rollout ranks; sets of one rank have none."""
        sets = sorted({flow.members for flow in self.flows.flows if len(flow.members) > 1})
        return {members: 1 + index for index, members in enumerate(sets)}

    @property
    def num_channels(self) -> int:
        """Number of channels, with channel 0."""
        return 1 + len(self.channels)

    @cached_property
    def num_rounds(self) -> int:
        """Number of rounds of the push. Cuts all flows; ranks do not need it for their own parts."""
        ends = (
            max(self.chunks(number).rounds) + 1 + (len(flow.members) > 1)
            for number, flow in enumerate(self.flows.flows)
        )
        return max(ends, default=0)

    def chunks(self, number: int) -> FlowChunks:
        """Returns the chunks of a flow; flows of the same content are cut once."""
        if number not in self._chunks:
            self._chunks[number] = self._cut_flow(self.flows.flows[number], self.sizes[number])
        return self._chunks[number]

    @cached_property
    def _chunks(self) -> dict[int, FlowChunks]:
        return {}

    def _cut_flow(self, flow: Flow, size: int) -> FlowChunks:
        key = flow.content, size
        cut = self._cut.get(key)
        if cut is None:
            cargo = self.flows.cargo(flow)
            chunks = cut_flow(cargo, size, self.flows.cover.boxes)
            columns = cargo.need[chunks.item], cargo.part[chunks.item], chunks.box, chunks.offset
            # Lists, because most messages have a single chunk, and numpy takes microseconds for a row.
            rows = list(zip(*(column.tolist() for column in columns), strict=True))
            cut = self._cut[key] = (rows, *_runs(chunks))
        rows, starts, sizes = cut
        count, numbers = len(flow.members), range(len(sizes))
        return FlowChunks(
            chunks=rows,
            starts=starts,
            sizes=sizes,
            rounds=[index // count for index in numbers],
            # Each source begins with a different member, which spreads the remainders of the last round.
            first=[flow.members[(index + flow.source) % count] for index in numbers],
        )

    @cached_property
    def _cut(self) -> dict[tuple[tuple[int, ...], int], tuple[list[ChunkRow], list[int], list[int]]]:
        return {}

    @cached_property
    def _flows_of(self) -> dict[int, list[int]]:
        """Numbers of the flows of each group rank, ascending."""
        flows: dict[int, list[int]] = {}
        for number, flow in enumerate(self.flows.flows):
            for rank in (flow.source, *(self.num_sources + member for member in flow.members)):
                flows.setdefault(rank, []).append(number)
        return flows

    def messages_of(self, rank: int) -> dict[MessageKey, list[MessagePart]]:
        """Returns every message that a group rank sends or receives, with its parts, learner by learner."""
        return self._messages(self._flows_of.get(rank, []), rank)

    def _messages(
        self, numbers: Iterable[int], only: int | None = None
    ) -> dict[MessageKey, list[MessagePart]]:
        """Returns all messages of some flows, or only those of group rank `only`."""
        messages: dict[MessageKey, list[MessagePart]] = {}
        member = None if only is None else only - self.num_sources
        for number in numbers:
            flow, chunks = self.flows.flows[number], self.chunks(number)
            channel = self.channels.get(flow.members, 0)
            for index, size in enumerate(chunks.sizes):
                first, at = chunks.first[index], chunks.rounds[index]
                start, stop = chunks.starts[index], chunks.starts[index + 1]
                if only == flow.source:
                    receivers: Sequence[int] = (first,)
                else:
                    receivers = flow.members if member in (None, first) else (member,)
                for rank in receivers:
                    if rank == first:
                        key = MessageKey(flow.source, self.num_sources + rank, at, channel)
                    else:
                        key = MessageKey(self.num_sources + first, self.num_sources + rank, at + 1, channel)
                    parts = messages.setdefault(key, [])
                    lead = parts[-1].lead + parts[-1].size if parts else 0
                    parts.append(MessagePart(number, start, stop, lead, size))
        return messages

    def relay_pairs_of(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Returns the pairs (relay, receiver) of group ranks that include this rank, ascending."""
        if rank < self.num_sources:
            return ()
        pairs = {(key.sender, key.receiver) for key in self.messages_of(rank)}
        return tuple(sorted(pair for pair in pairs if pair[0] >= self.num_sources))

    @cached_property
    def fingerprint(self) -> bytes:
        """Returns 32 bytes that are equal exactly if the plans are equal.

        Chunks follow from layouts, flows and their sizes.
        """
        hasher = hashlib.sha256()
        head = [PLAN_SCHEMA, self.num_sources, self.num_destinations, self.item_bytes]
        sets = {members: index for index, members in enumerate({f.members: 0 for f in self.flows.flows})}
        rows = [
            (flow.source, sets[flow.members], flow.volume, size)
            for flow, size in zip(self.flows.flows, self.sizes, strict=True)
        ]
        hasher.update(msgpack.packb([*head, list(sets), rows]))
        hasher.update(self.layouts)
        return hasher.digest()

    def content_of(self, part: MessagePart) -> tuple[object, ...]:
        """Returns a key that is equal for message parts with the same packed content."""
        return self.flows.flows[part.flow].content, self.sizes[part.flow], part.start

    def pieces_of(self, key: MessageKey, part: MessagePart) -> Iterator[Piece]:
        """Yields the pieces of a part of a message."""
        flow, chunks = self.flows.flows[part.flow], self.chunks(part.flow).chunks
        boxes = self.flows.cover.boxes.boxes
        relay = None if key.sender < self.num_sources else key.sender - self.num_sources
        destination = key.receiver - self.num_sources
        for need, own, number, offset in chunks[part.start : part.stop]:
            source, needed = self._ends(need, own, destination)
            yield Piece(
                flow.source,
                relay,
                destination,
                key.round,
                key.channel,
                part.lead + offset,
                needed.name,
                boxes[number],
                source.param or needed.name,
                self._place(number, source.box.start, source.offset),
                needed.param,
                self._place(number, needed.box.start, needed.offset),
            )

    def _ends(self, need: int, part: int, destination: int) -> tuple[HeldPart, TensorSlice]:
        """Returns the source's part and the destination's slice of a need."""
        return self.flows.cover.part_of(need, part), self.flows.slice_of(need, destination)

    def _place(self, number: int, start: tuple[int, ...], offset: tuple[int, ...]) -> Box:
        """Returns where a box lies in a parameter; cached, because layers repeat the same few boxes."""
        key = (number, start, offset)
        place = self._places.get(key)
        if place is None:
            box = self.flows.cover.boxes.boxes[number]
            place = self._places[key] = box.relative_to(start).translate(offset)
        return place

    @cached_property
    def _places(self) -> dict[tuple[int, tuple[int, ...], tuple[int, ...]], Box]:
        return {}

    def sent_bytes(self, source: int) -> int:
        """Returns the bytes that leave this learner rank in a push."""
        flows = (self.flows.flows[number] for number in self._flows_of.get(source, []))
        return self.item_bytes * sum(flow.volume for flow in flows)

    def received_bytes(self, destination: int) -> int:
        """Returns the bytes that reach this rollout rank in a push."""
        numbers = self._flows_of.get(self.num_sources + destination, [])
        return self.item_bytes * sum(self.flows.flows[number].volume for number in numbers)

    def relayed_bytes(self, destination: int) -> int:
        """Returns the bytes that this rollout rank relays in a push."""
        rank = self.num_sources + destination
        messages = self.messages_of(rank).items()
        return self.item_bytes * sum(part.size for key, ps in messages if key.sender == rank for part in ps)

    @cached_property
    def cost_bytes(self) -> int:
        """Estimates how long a push takes, in bytes over the link of one rank.

        The busiest rank's link or the busiest node's network bounds the push; rounds are about equal. Members
        of a set share the relaying.
        """
        sources, members = self.nodes[: self.num_sources], self.nodes[self.num_sources :]
        sent, received, relayed = Counter[int](), Counter[int](), Counter[int]()
        out, into = Counter[int](), Counter[int]()
        num_rounds = 0
        volumes: dict[Members, Counter[int]] = {}
        for flow, most in zip(self.flows.flows, self.sizes, strict=True):
            count = len(flow.members)
            num_rounds = max(num_rounds, -(-flow.volume // (most * count)) + (count > 1))
            sent[flow.source] += flow.volume
            volumes.setdefault(flow.members, Counter())[sources[flow.source]] += flow.volume
        for ranks, by_node in volumes.items():
            count, volume = len(ranks), sum(by_node.values())
            of_node = Counter(members[rank] for rank in ranks)
            for rank in ranks:
                received[rank] += volume
                relayed[rank] += volume * (count - 1) // count
            for node, number in of_node.items():
                # A member gets its own share from learners, and the shares of members on other nodes.
                others = volume - by_node[node] + volume * (count - number)
                into[node] += number * others // count
                out[node] += number * (count - number) * volume // count
            for node, load in by_node.items():
                out[node] += load * (count - of_node[node]) // count
        ends = (max(part.values(), default=0) for part in (sent, received, relayed))
        network = _NETWORK_COST * max(*out.values(), *into.values(), 0, 0)
        return self.item_bytes * max(*ends, network) + _ROUND_COST_BYTES * num_rounds


def _runs(cut: Chunks) -> tuple[list[int], list[int]]:
    """Returns each message's first chunk, then the number of chunks; and each message's elements."""
    starts = np.flatnonzero(np.concatenate([[True], cut.number[1:] != cut.number[:-1]]))
    return [*starts.tolist(), len(cut.number)], np.add.reduceat(cut.volume, starts).tolist()


@collector_paused()
def build_plan(
    sources: Sequence[RankLayout],
    destinations: Sequence[RankLayout],
    *,
    item_bytes: int,
    round_bytes: int,
    relay: str = "never",
) -> TransferPlan:
    """Intersects the boxes that learner ranks hold with those that rollout ranks need.

    Args:
        sources: one layout per learner rank.
        destinations: one layout per rollout rank; those of the general path are expanded to every tensor.
        item_bytes: bytes per element on the wire.
        round_bytes: largest number of bytes that a rank packs, or receives, in one round.
        relay: whether rollout ranks that need the same box relay it to each other. "auto": if `cost_bytes` is
            lower; "always": if two ranks on a node need the same box (for tests).

    Raises:
        WeightSyncError: no source holds a needed part, no destination needs a tensor, two slices are written
            to the same place, or a round is too small for one element.
    """
    if relay not in RELAY_MODES:
        raise ValueError(f"relay {relay!r} is none of {', '.join(RELAY_MODES)}")
    capacity = round_bytes // item_bytes
    if capacity < 1:
        raise WeightSyncError(f"round_bytes is {round_bytes}; it must hold at least one element")
    sharding = Sharding.of(sources)
    nodes = _number_nodes([*sharding.places, *(layout.place for layout in destinations)])
    destinations = _checked(destinations, sharding)
    digest = _digest_of(sharding, [layout for _, layout in _different(destinations)])
    nobody = [0] * len(destinations)
    by_node = nodes[len(sharding) :]
    demand = Demand.of(sharding, destinations, nobody)
    # If learners hold several copies, each node is served by its own copy.
    near = Demand.of(sharding, destinations, by_node) if sharding.has_copies else demand

    def plan(demand: Demand, together: Sequence[int], smallest_share: float = 0.0) -> TransferPlan:
        flows = demand.flows(together=together, smallest_share=smallest_share)
        return TransferPlan(
            num_sources=len(sharding),
            num_destinations=len(destinations),
            item_bytes=item_bytes,
            flows=flows,
            sizes=chunk_sizes(flows.flows, capacity),
            layouts=digest,
            nodes=nodes,
        )

    if relay == "always":
        return plan(near, by_node)
    direct = plan(near, range(len(destinations)))
    candidates = [direct]
    if relay == "auto" and _egress_binds(direct):
        candidates.append(plan(demand, nobody, SMALLEST_SHARE))
    # A slice that several ranks of a node need should cross the network once.
    if relay == "auto" and len(set(nodes)) > 1 and len(set(by_node)) < len(by_node):
        candidates.append(plan(near, by_node, SMALLEST_SHARE))
    return min(candidates, key=lambda candidate: candidate.cost_bytes)


def _checked(destinations: Sequence[RankLayout], sharding: Sharding) -> Sequence[RankLayout]:
    """Expands the destinations of the general path; raises WeightSyncError if one does not fit."""
    for rank, layout in _different(destinations):
        _check_shapes(rank, layout, sharding)
    expanded = expand_all(destinations, sharding.shapes)
    different = _different(expanded)
    for rank, layout in different:
        _check_disjoint(rank, layout)
    _check_all_used(sharding.shapes, [layout for _, layout in different])
    return expanded


def _egress_binds(plan: TransferPlan) -> bool:
    """Returns whether a learner rank sends more than any rollout rank receives: only then relaying helps."""
    sent = max((plan.sent_bytes(source) for source in range(plan.num_sources)), default=0)
    return sent > max((plan.received_bytes(rank) for rank in range(plan.num_destinations)), default=0)


def _different(layouts: Sequence[RankLayout]) -> list[tuple[int, RankLayout]]:
    """Returns each distinct layout with its first rank; places are ignored."""
    ranks: dict[int, tuple[int, RankLayout]] = {}
    for rank, layout in enumerate(layouts):
        ranks.setdefault(id(layout.slices), (rank, layout))
    return list(ranks.values())


def _number_nodes(places: Iterable[RankPlace]) -> tuple[int, ...]:
    """Returns a number for each rank that is equal for ranks of one node."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(place.node, len(numbers)) for place in places)


def _digest_of(sharding: Sharding, destinations: Sequence[RankLayout]) -> bytes:
    """Returns a digest of all layouts: tensors, parameters and places in them."""
    hasher = hashlib.sha256(sharding.slices_to_bytes())
    for layout in destinations:
        hasher.update(layout.slices_to_bytes())
    return hasher.digest()


def _check_shapes(rank: int, layout: RankLayout, sharding: Sharding) -> None:
    for part in layout.slices:
        known = sharding.shapes.get(part.name, part.global_shape)
        if known != part.global_shape:
            raise WeightSyncError(
                f"{part.name}: rollout rank {rank} gives shape {part.global_shape}, the learner {known}; "
                "the two sides do not run the same model"
            )


def _check_all_used(shapes: Mapping[str, tuple[int, ...]], destinations: Sequence[RankLayout]) -> None:
    used = {part.name for layout in destinations for part in layout.slices}
    unused = [name for name in shapes if name not in used]
    if destinations and unused:
        raise WeightSyncError(
            f"{unused[0]}: the learner holds it but no rollout rank takes it ({len(unused)} such tensors); "
            "it would be trained and never sampled from. If that is intended, exclude it on the learner"
        )


def _check_disjoint(rank: int, layout: RankLayout) -> None:
    places: dict[str, list[tuple[Box, str]]] = {}
    for part in layout.slices:
        for box, name in places.setdefault(part.param, []):
            if box.intersect(part.local_box) is not None:
                raise WeightSyncError(
                    f"rollout rank {rank}: {part.name} and {name} would both land in {part.param} "
                    f"at {part.local_box.start}"
                )
        places[part.param].append((part.local_box, part.name))
