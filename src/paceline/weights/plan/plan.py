"""The transfer plan: every piece that moves in a weight push, with its source, relay, destination and round.

The plan is a pure function of the layouts, the element size, the size of a round and the relay mode. Every
rank computes it from the same bytes; the fingerprints are compared when the group forms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import msgpack
import numpy as np

from paceline.core.errors import WeightSyncError
from paceline.weights.geometry.box_table import IntArray
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, TensorSlice, expand_all, tensor_shapes
from paceline.weights.plan.flows import SMALLEST_SHARE, Chunks, Flows, Members, cut_all, gather_flows
from paceline.weights.plan.rounds import chunk_sizes

RELAY_MODES: Final = ("auto", "never", "always")

_ROUND_COST_BYTES: Final = 64 << 20
"""Bytes that a link carries in the time it takes to start and end a round (0.2 ms at 350 GB/s)"""

_NETWORK_COST: Final = 8
"""How much longer a byte takes over a node's network (50 GB/s) than over a rank's link in it (400 GB/s)"""


class MessageKey(NamedTuple):
    """One message between two ranks of the group (learners come first).

    Channel 0 carries what nobody relays; each other channel what one set of rollout ranks has in common.
    """

    sender: int
    receiver: int
    round: int
    channel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One box of one tensor on its way to one destination.

    Attributes:
        source, destination: index among the learner ranks, index among the rollout ranks.
        relay: the rollout rank that received it one round earlier and relays it; None if the source sends it
            itself.
        round, channel: of the message that carries it.
        offset: its first element in that message.
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


@dataclass(frozen=True, kw_only=True, eq=False)
class TransferPlan:
    """All pieces of a push, as columns: a row per chunk of a flow, ordered by flow.

    A chunk is a piece for the member of its flow that receives it from the learner, and one more for each
    member that this one relays it to. A relay passes on everything that it received over one channel in a
    round, in the same order: learner by learner.

    Attributes:
        flows: who sends what to whom.
        channels: the channel of each set of rollout ranks; single ranks have none of their own.
        flow: of each chunk.
        row: of the cover that a chunk is a part of.
        box, volume: the part's number in the table of boxes, and its elements.
        round: of a chunk's first message.
        first: the rollout rank that receives it first.
        offset, relay_offset: its first element in that message, and in those that relay it.
        layouts: a digest of all layouts, to which the columns refer by number.
        nodes: a number for each rank of the group; equal for ranks of one node.
    """

    num_sources: int
    num_destinations: int
    num_rounds: int
    num_channels: int
    item_bytes: int
    flows: Flows
    channels: dict[Members, int]
    flow: IntArray
    row: IntArray
    box: IntArray
    volume: IntArray
    round: IntArray
    first: IntArray
    offset: IntArray
    relay_offset: IntArray
    layouts: bytes
    nodes: tuple[int, ...]

    @cached_property
    def message_sizes(self) -> dict[MessageKey, int]:
        """Number of elements of every message; there are no empty ones."""
        volumes = self.volume
        keys = np.stack([self.flow, self.first, self.round])
        starts = np.flatnonzero(np.any(keys[:, 1:] != keys[:, :-1], axis=0)) + 1
        starts = np.concatenate([np.zeros(min(1, len(volumes)), np.int64), starts])
        sizes: dict[MessageKey, int] = {}
        sums = np.add.reduceat(volumes, starts).tolist() if len(volumes) else []
        for (number, first, at), size in zip(keys[:, starts].T.tolist(), sums, strict=True):
            flow = self.flows.flows[number]
            channel = self.channels.get(flow.members, 0)
            for rank in flow.members:
                if rank == first:
                    key = MessageKey(flow.source, self.num_sources + rank, at, channel)
                else:
                    key = MessageKey(self.num_sources + first, self.num_sources + rank, at + 1, channel)
                sizes[key] = sizes.get(key, 0) + size
        return sizes

    def message_of(self, piece: Piece) -> MessageKey:
        """The message that carries a piece."""
        sender = piece.source if piece.relay is None else self.num_sources + piece.relay
        return MessageKey(sender, self.num_sources + piece.destination, piece.round, piece.channel)

    @cached_property
    def relay_pairs(self) -> tuple[tuple[int, int], ...]:
        """Group ranks of every rollout rank that relays and of each that it relays to, ascending."""
        pairs = {(key.sender, key.receiver) for key in self.message_sizes if key.sender >= self.num_sources}
        return tuple(sorted(pairs))

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that are equal exactly if the plans are equal."""
        hasher = hashlib.sha256()
        head = [self.num_sources, self.num_destinations, self.num_rounds, self.num_channels, self.item_bytes]
        hasher.update(msgpack.packb([*head, [[flow.source, flow.members] for flow in self.flows.flows]]))
        hasher.update(msgpack.packb([[*box.start, *box.stop] for box in self.flows.cover.boxes.boxes]))
        need, holder = self.flows.cover.need[self.row], self.flows.cover.holder[self.row]
        places = (self.flow, need, holder, self.box, self.round, self.first, self.offset, self.relay_offset)
        for column in places:
            hasher.update(column.astype("<i8").tobytes())
        hasher.update(self.layouts)
        return hasher.digest()

    @property
    def pieces(self) -> Iterator[Piece]:
        """Every piece: those that learners send, by (source, members), then those that are relayed."""
        yield from self._pieces(np.arange(len(self.flow)), relayed=False)
        yield from self._pieces(np.arange(len(self.flow)), relayed=True)

    def of_source(self, source: int) -> list[Piece]:
        """The pieces that this learner rank sends."""
        sends = np.array([flow.source == source for flow in self.flows.flows], dtype=bool)
        return list(self._pieces(np.flatnonzero(sends[self.flow]), relayed=False))

    def of_destination(self, destination: int) -> list[Piece]:
        """The pieces that this rollout rank receives, from learners and from relays."""
        takes = np.array([destination in flow.members for flow in self.flows.flows], dtype=bool)
        chunks = np.flatnonzero(takes[self.flow])
        direct = self.first[chunks] == destination
        return [
            *self._pieces(chunks[direct], relayed=False),
            *self._pieces(chunks[~direct], relayed=True, only=destination),
        ]

    def _pieces(self, chunks: IntArray, *, relayed: bool, only: int | None = None) -> Iterator[Piece]:
        """The pieces of some chunks: those that a learner sends, or those that are relayed."""
        cover, groups = self.flows.cover, self.flows.groups
        places: dict[tuple[object, ...], Box] = {}

        def place(part: TensorSlice, number: int) -> Box:
            # Layers repeat: few different boxes lie in few different places.
            key = (number, part.box.start, part.offset)
            if key not in places:
                places[key] = part.to_local(cover.boxes.boxes[number])
            return places[key]

        for chunk in chunks.tolist():
            row, first = int(self.row[chunk]), int(self.first[chunk])
            source_slice, number = cover.source_slice(row), int(self.box[chunk])
            group = groups[cover.need[row]]
            channel = self.channels.get(self.flows.flows[self.flow[chunk]].members, 0)
            for rank, part in group:
                if (rank != first) is not relayed or only not in (None, rank):
                    continue
                yield Piece(
                    source=int(cover.source[row]),
                    relay=first if relayed else None,
                    destination=rank,
                    round=int(self.round[chunk]) + relayed,
                    channel=channel,
                    offset=int((self.relay_offset if relayed else self.offset)[chunk]),
                    name=part.name,
                    box=cover.boxes.boxes[number],
                    source_param=source_slice.param,
                    source_box=place(source_slice, number),
                    destination_param=part.param,
                    destination_box=place(part, number),
                )

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
        """How long a push takes, in bytes over the link of one rank.

        A round lasts as long as its busiest rank sends or receives, or its busiest node over the network.
        """
        loads: dict[tuple[int, str, int, bool], int] = {}
        for key, size in self.message_sizes.items():
            ends = [("rank", key.sender, True), ("rank", key.receiver, False)]
            origin, target = self.nodes[key.sender], self.nodes[key.receiver]
            if origin != target:
                ends += [("node", origin, True), ("node", target, False)]
            for kind, number, sends in ends:
                cost = size * self.item_bytes * (_NETWORK_COST if kind == "node" else 1)
                end = (key.round, kind, number, sends)
                loads[end] = loads.get(end, 0) + cost
        busiest = [0] * self.num_rounds
        for (number, *_), load in loads.items():
            busiest[number] = max(busiest[number], load)
        return sum(busiest) + _ROUND_COST_BYTES * self.num_rounds

    def _bytes(self, keys: Iterable[MessageKey]) -> int:
        return self.item_bytes * sum(self.message_sizes[key] for key in keys)


def build_plan(
    sources: Sequence[RankLayout],
    destinations: Sequence[RankLayout],
    *,
    item_bytes: int,
    round_bytes: int,
    relay: str = "never",
) -> TransferPlan:
    """Intersects what learner ranks hold with what rollout ranks need.

    Args:
        sources: one layout per learner rank.
        destinations: one layout per rollout rank; those of the general path are expanded to every tensor.
        item_bytes: bytes per element on the wire.
        round_bytes: most bytes that any rank packs in one round, or receives in one from learners and relays.
        relay: whether rollout ranks that need the same box relay it to each other. "auto": if that is faster,
            by `cost_bytes`; "always": whenever two on one node need the same box, for tests.

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
    nodes = _number_nodes([*sources, *destinations])
    learner_shapes = tensor_shapes(sources)
    destinations = expand_all(destinations, learner_shapes)
    _check_all_used(learner_shapes, destinations)
    # Layouts that differ only in their place share their slices.
    different = {id(layout.slices): (rank, layout) for rank, layout in reversed([*enumerate(destinations)])}
    for rank, layout in different.values():
        _check_disjoint(rank, layout)
    digest = _digest_of(sources, [layout for _, layout in different.values()])
    order = {name: index for index, name in enumerate(shapes)}

    def plan(together: Sequence[int], smallest_share: float = 0.0) -> TransferPlan:
        flows = gather_flows(sources, destinations, order, together=together, smallest_share=smallest_share)
        return _plan_flows(flows, nodes, len(sources), item_bytes, capacity, digest)

    by_node = nodes[len(sources) :]
    if relay == "always":
        return plan(by_node)
    direct = plan(range(len(destinations)))
    candidates = [direct]
    if relay == "auto" and _egress_binds(direct):
        candidates.append(plan([0] * len(destinations), SMALLEST_SHARE))
    # Over the network a slice that several ranks of a node need should come once.
    if relay == "auto" and len(set(nodes)) > 1 and len(set(by_node)) < len(by_node):
        candidates.append(plan(by_node, SMALLEST_SHARE))
    return min(candidates, key=lambda candidate: candidate.cost_bytes)


def _egress_binds(plan: TransferPlan) -> bool:
    """Whether some learner rank sends more than any rollout rank receives: relaying helps only then."""
    sent = max((plan.sent_bytes(source) for source in range(plan.num_sources)), default=0)
    return sent > max((plan.received_bytes(rank) for rank in range(plan.num_destinations)), default=0)


def _number_nodes(layouts: Sequence[RankLayout]) -> tuple[int, ...]:
    """A number for each rank, equal for ranks of one node."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(layout.place.node, len(numbers)) for layout in layouts)


def _plan_flows(
    flows: Flows,
    nodes: tuple[int, ...],
    num_sources: int,
    item_bytes: int,
    capacity: int,
    layouts: bytes,
) -> TransferPlan:
    """Assigns its message to every chunk, and to chunks of larger sets also the messages that relay them."""
    sets = sorted({flow.members for flow in flows.flows if len(flow.members) > 1})
    channels = {members: 1 + index for index, members in enumerate(sets)}
    # Elements of earlier sources that come first in what a relay passes on.
    before: dict[tuple[int, int, int], int] = {}
    columns: list[tuple[IntArray, ...]] = []
    cut = cut_all(flows.flows, chunk_sizes(flows.flows, capacity), flows.cover.boxes)
    for index, (flow, chunks) in enumerate(zip(flows.flows, cut, strict=True)):
        count = len(flow.members)
        # Each source begins with another member: this spreads the remainders of the last round.
        first = np.array(flow.members)[(chunks.number + flow.source) % count]
        relay_offset = chunks.offset
        if count > 1:
            relay_offset = chunks.offset + _lead(chunks, first, count, channels[flow.members], before)
        columns.append(
            (
                np.full(len(first), index),
                flow.rows[chunks.item],
                chunks.box,
                chunks.volume,
                chunks.number // count,
                first,
                chunks.offset,
                relay_offset,
            )
        )
    of_flow, row, box, volume, at, first, offset, relay_offset = (
        np.concatenate([np.zeros(0, np.int64), *column])
        for column in (zip(*columns, strict=True) if columns else [[]] * 8)
    )
    relayed = np.array([len(flow.members) > 1 for flow in flows.flows], dtype=bool)
    return TransferPlan(
        num_sources=num_sources,
        num_destinations=len(nodes) - num_sources,
        num_rounds=int((at + 1 + relayed[of_flow]).max()) if len(at) else 0,
        num_channels=1 + len(sets),
        item_bytes=item_bytes,
        flows=flows,
        channels=channels,
        flow=of_flow,
        row=row,
        box=box,
        volume=volume,
        round=at,
        first=first,
        offset=offset,
        relay_offset=relay_offset,
        layouts=layouts,
        nodes=nodes,
    )


def _lead(
    chunks: Chunks,
    first: IntArray,
    count: int,
    channel: int,
    before: dict[tuple[int, int, int], int],
) -> IntArray:
    """What comes before each chunk's message in what its relay passes on; adds the messages to `before`."""
    starts = np.flatnonzero(np.concatenate([[True], chunks.number[1:] != chunks.number[:-1]]))
    sizes = np.add.reduceat(chunks.volume, starts)
    leads: list[int] = []
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        place = (int(first[start]), int(chunks.number[start]) // count, channel)
        leads.append(before.get(place, 0))
        before[place] = leads[-1] + size
    return np.repeat(np.array(leads, dtype=np.int64), np.diff([*starts.tolist(), len(first)]))


def _digest_of(sources: Sequence[RankLayout], destinations: Sequence[RankLayout]) -> bytes:
    """A digest of all layouts: tensors, parameters and places."""
    hasher = hashlib.sha256()
    for layout in (*sources, *destinations):
        hasher.update(layout.slices_to_bytes())
    return hasher.digest()


def _check_all_used(shapes: dict[str, tuple[int, ...]], destinations: Sequence[RankLayout]) -> None:
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
