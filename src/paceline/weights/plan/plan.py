"""The transfer plan: every piece that moves in a weight push, from whom, by way of whom, to whom, in which round.

The plan is a pure function of the layouts, the element size, the round's size and the relay mode. Every rank computes it for
itself from the same bytes; the fingerprints are compared when the group forms.
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
from paceline.weights.geometry.layout import RankLayout, expand_whole, tensor_shapes
from paceline.weights.plan.flows import SMALLEST_SHARE, Flow, deal, gather_flows
from paceline.weights.plan.rounds import chunk_sizes

RELAY_MODES: Final = ("auto", "never", "always")

_ROUND_COST_BYTES: Final = 64 << 20
"""What a link carries in the time that it takes to start and end a round (0.2 ms at 350 GB/s)"""


class MessageKey(NamedTuple):
    """One message. `sender` and `receiver` are ranks of the group (learners first); `channel` 0 holds what nobody passes on,
    any other what a certain set of rollout ranks has in common."""

    sender: int
    receiver: int
    round: int
    channel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One box of one tensor on its way to one destination.

    Attributes:
        source, destination: index among the learner ranks, index among the rollout ranks.
        relay: the rollout rank that got it the round before and passes it on; None where it comes from the source itself.
        round, channel: of the message that brings it.
        offset: its first element in that message.
        name: the tensor; box: the part, in global indices.
        source_param, source_box: where the learner finds it; destination_param, destination_box: where it lands.
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
    """All pieces of a push: those that leave learners, by (source, members that need them), then those that are passed on.

    A relay passes on all that one channel brought it in a round, as it lies there: learner after learner.
    """

    num_sources: int
    num_destinations: int
    num_rounds: int
    num_channels: int
    item_bytes: int
    pieces: tuple[Piece, ...]

    @cached_property
    def message_sizes(self) -> dict[MessageKey, int]:
        """Elements of every message that is not empty."""
        sizes: dict[MessageKey, int] = {}
        for piece in self.pieces:
            key = self.message_of(piece)
            sizes[key] = sizes.get(key, 0) + piece.box.volume
        return sizes

    def message_of(self, piece: Piece) -> MessageKey:
        """The message that brings a piece."""
        sender = piece.source if piece.relay is None else self.num_sources + piece.relay
        return MessageKey(sender, self.num_sources + piece.destination, piece.round, piece.channel)

    @cached_property
    def relay_pairs(self) -> tuple[tuple[int, int], ...]:
        """Group ranks of the rollout ranks that pass something on, each with whom it goes to, ascending."""
        pairs = {(key.sender, key.receiver) for key in self.message_sizes if key.sender >= self.num_sources}
        return tuple(sorted(pairs))

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that are equal exactly if the plans are."""
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
        """What this learner rank sends."""
        return [piece for piece in self.pieces if piece.source == source and piece.relay is None]

    def of_destination(self, destination: int) -> list[Piece]:
        """What this rollout rank receives, from learners and from others."""
        return [piece for piece in self.pieces if piece.destination == destination]

    def sent_bytes(self, source: int) -> int:
        """Bytes that leave this learner rank in a push."""
        return self._bytes(key for key in self.message_sizes if key.sender == source)

    def received_bytes(self, destination: int) -> int:
        """Bytes that reach this rollout rank in a push."""
        rank = self.num_sources + destination
        return self._bytes(key for key in self.message_sizes if key.receiver == rank)

    def relayed_bytes(self, destination: int) -> int:
        """Bytes that this rollout rank passes on in a push."""
        rank = self.num_sources + destination
        return self._bytes(key for key in self.message_sizes if key.sender == rank)

    @cached_property
    def cost_bytes(self) -> int:
        """How long a push takes, in bytes over one link: each round lasts as long as the rank that sends or receives most in it."""
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
        destinations: one layout per rollout rank; `whole` ones are expanded to every tensor.
        item_bytes: bytes per element on the wire.
        round_bytes: most bytes that any rank receives in one round, at first or second hand, or packs for one.
        relay: whether rollout ranks that need the same pass it on among themselves. "auto": where that is faster, by
            `cost_bytes`; "always": wherever two need the same, for tests.

    Raises:
        WeightSyncError: a needed part is held by nobody, a held tensor is needed by nobody, two slices
            land in the same place, or a round is too small for one element.
    """
    if relay not in RELAY_MODES:
        raise ValueError(f"relay {relay!r} is none of {', '.join(RELAY_MODES)}")
    capacity = round_bytes // item_bytes
    if capacity < 1:
        raise WeightSyncError(f"round_bytes is {round_bytes}; it must hold at least one element")
    shapes = tensor_shapes([*sources, *destinations])
    learner_shapes = tensor_shapes(sources)
    destinations = [expand_whole(layout, learner_shapes) for layout in destinations]
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
    """Whether some learner rank sends more than any rollout rank receives: only then can relaying help."""
    sent = max((plan.sent_bytes(source) for source in range(plan.num_sources)), default=0)
    return sent > max((plan.received_bytes(rank) for rank in range(plan.num_destinations)), default=0)


def _plan_flows(
    flows: Sequence[Flow], num_sources: int, num_destinations: int, item_bytes: int, capacity: int
) -> TransferPlan:
    """Gives every chunk its message, and every chunk of a larger set the messages that pass it on."""
    sets = sorted({flow.members for flow in flows if len(flow.members) > 1})
    channels = {members: 1 + index for index, members in enumerate(sets)}
    first: list[Piece] = []
    copies: list[Piece] = []
    # Elements that earlier sources put before this one's, in what a relay passes on.
    before: dict[tuple[int, int, int], int] = {}
    for flow, size in zip(flows, chunk_sizes(flows, capacity), strict=True):
        channel = channels.get(flow.members, 0)
        filled: dict[tuple[int, int, int], int] = {}
        for chunk in deal(flow, size):
            head = flow.members[chunk.member]
            place = (head, chunk.round, channel)
            for index, rank in enumerate(flow.members):
                part, direct = chunk.cargo.wanted[index], rank == head
                piece = Piece(
                    source=flow.source,
                    relay=None if direct else head,
                    destination=rank,
                    round=chunk.round + (not direct),
                    channel=channel,
                    offset=chunk.offset + (0 if direct else before.get(place, 0)),
                    name=part.name,
                    box=chunk.box,
                    source_param=chunk.cargo.held.param,
                    source_box=chunk.cargo.held.to_local(chunk.box),
                    destination_param=part.param,
                    destination_box=part.to_local(chunk.box),
                )
                (first if direct else copies).append(piece)
            filled[place] = filled.get(place, 0) + chunk.box.volume
        for place, size in filled.items():
            before[place] = before.get(place, 0) + size
    pieces = (*first, *copies)
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
            "it would be trained and never sampled from. Exclude it on the learner if that is meant"
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
