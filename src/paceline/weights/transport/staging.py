"""Where each message of a rank lies in its staging memory; every rank can compute it for any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.weights.plan.plan import MessageKey, Piece, TransferPlan

NUM_SLOTS: Final = 2
"""Rounds in staging at the same time: one is packed or scattered while the other is transferred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A message's place in staging; `slot` is the parity of the round that fills it."""

    key: MessageKey
    slot: int
    begin: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingLayout:
    """A rank's staging, in elements.

    Attributes:
        sends, receives: messages by round.
        pieces: by round, each with its offset in the round's slot.
        slot_sizes: of each slot.
    """

    sends: Sequence[Sequence[Slice]]
    receives: Sequence[Sequence[Slice]]
    pieces: Sequence[Sequence[tuple[Piece, int]]]
    slot_sizes: tuple[int, ...]


def lay_out(plan: TransferPlan, num_learners: int, rank: int) -> StagingLayout:
    """Lays out the messages of a group rank.

    What a learner sends equally to several replicas is packed once. What a rollout rank relays lies in
    one stretch, channel by channel and learner after learner, so that it is sent as one message.
    """
    sending = rank < num_learners
    pieces: dict[MessageKey, list[Piece]] = {}
    for piece in plan.of_source(rank) if sending else plan.of_destination(rank - num_learners):
        pieces.setdefault(plan.message_of(piece), []).append(piece)
    sends: list[list[Slice]] = [[] for _ in range(plan.num_rounds)]
    receives: list[list[Slice]] = [[] for _ in range(plan.num_rounds)]
    rounds: list[list[tuple[Piece, int]]] = [[] for _ in range(plan.num_rounds)]
    places: dict[object, int] = {}
    filled = [0] * plan.num_rounds
    for key in sorted(pieces, key=lambda key: (key.round, key.channel, key.sender, key.receiver)):
        number, size = key.round, plan.message_sizes[key]
        alike = tuple((piece.source_param, piece.source_box) for piece in pieces[key]) if sending else key
        begin = places.setdefault((number, alike), filled[number])
        messages = sends if sending else receives
        messages[number].append(Slice(key=key, slot=number % NUM_SLOTS, begin=begin, size=size))
        if begin == filled[number]:
            rounds[number] += [(piece, begin + piece.offset) for piece in pieces[key]]
            filled[number] += size
    if not sending:
        for key in sorted(key for key in plan.message_sizes if key.sender == rank):
            sends[key.round].append(_relayed(key, receives[key.round - 1], plan, num_learners))
    sizes = [0] * NUM_SLOTS
    for message in (message for messages in (*sends, *receives) for message in messages):
        sizes[message.slot] = max(sizes[message.slot], message.begin + message.size)
    return StagingLayout(sends=sends, receives=receives, pieces=rounds, slot_sizes=tuple(sizes))


def _relayed(key: MessageKey, received: Sequence[Slice], plan: TransferPlan, num_learners: int) -> Slice:
    """The place in staging at which the content of a relayed message arrived, one round earlier."""
    parts = [part for part in received if part.key.channel == key.channel and part.key.sender < num_learners]
    size = plan.message_sizes[key]
    begin = min(part.begin for part in parts)
    assert sum(part.size for part in parts) == size, "a relay passes on exactly what it received"
    return Slice(key=key, slot=(key.round - 1) % NUM_SLOTS, begin=begin, size=size)
