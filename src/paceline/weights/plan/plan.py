"""The transfer plan: every piece that moves in a weight push, with its source, relay, destination and round.

The plan is a pure function of the layouts, the element size, the size of a round and the relay mode. Every
rank computes it from the same bytes; the fingerprints are compared when the group forms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import msgpack

from paceline.core.errors import WeightSyncError
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, expand_full, tensor_shapes
from paceline.weights.plan.flows import SMALLEST_SHARE, Flow, deal, gather_flows
from paceline.weights.plan.rounds import chunk_sizes

RELAY_MODES: Final = ("auto", "never", "always")

_ROUND_COST_BYTES: Final = 64 << 20
"""Bytes that a link carries in the time it takes to start and end a round (0.2 ms at 350 GB/s)"""


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


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
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
        hasher.update(msgpack.packb(head))
        for p in self.pieces:
            boxes = [p.box, p.source_box, p.destination_box]
            route = [p.source, p.relay, p.destination, p.round, p.channel, p.offset]
            plain = [*route, p.name, p.source_param, p.destination_param]
            hasher.update(msgpack.packb([*plain, *([*box.start, *box.stop] for box in boxes)]))
        return hasher.digest()

    def of_source(self, source: int) -> list[Piece]:
        """The pieces that this learner rank sends."""
        return [piece for piece in self.pieces if piece.source == source and piece.relay is None]

    def of_destination(self, destination: int) -> list[Piece]:
        """The pieces that this rollout rank receives, from learners and from relays."""
        return [piece for piece in self.pieces if piece.destination == destination]

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
    _check_all_used(learner_shapes, destinations)
    for rank, layout in enumerate(destinations):
        _check_disjoint(rank, layout)
    order = {name: index for index, name in enumerate(shapes)}

    def plan(*, shared: bool, smallest_share: float = 0.0) -> TransferPlan:
        flows = gather_flows(sources, destinations, order, shared=shared, smallest_share=smallest_share)
        return _plan_flows(flows, len(sources), len(destinations), item_bytes, capacity)

    if relay == "always":
        return plan(shared=True)
    direct = plan(shared=False)
    if relay == "never" or not _egress_binds(direct):
        return direct
    relayed = plan(shared=True, smallest_share=SMALLEST_SHARE)
    return relayed if relayed.cost_bytes < direct.cost_bytes else direct


def _egress_binds(plan: TransferPlan) -> bool:
    """Whether some learner rank sends more than any rollout rank receives: relaying helps only then."""
    sent = max((plan.sent_bytes(source) for source in range(plan.num_sources)), default=0)
    return sent > max((plan.received_bytes(rank) for rank in range(plan.num_destinations)), default=0)


def _plan_flows(
    flows: Sequence[Flow], num_sources: int, num_destinations: int, item_bytes: int, capacity: int
) -> TransferPlan:
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
    return TransferPlan(
        num_sources=num_sources,
        num_destinations=num_destinations,
        num_rounds=max((piece.round + 1 for piece in pieces), default=0),
        num_channels=1 + len(sets),
        item_bytes=item_bytes,
        pieces=pieces,
    )


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
