"""Computes where each message of a rank lies in its staging memory; any rank can do so for any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from paceline.weights.plan.collector import collector_paused
from paceline.weights.plan.plan import MessageKey, MessagePart, Piece, TransferPlan

NUM_SLOTS: Final = 2
"""Rounds in staging at a time: one is packed or scattered while the other is transferred."""


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
        slot_sizes: size of each slot.
    """

    sends: Sequence[Sequence[Slice]]
    receives: Sequence[Sequence[Slice]]
    pieces: Sequence[Sequence[tuple[Piece, int]]]
    slot_sizes: tuple[int, ...]

    @property
    def num_rounds(self) -> int:
        """Number of rounds until this rank's last message; other ranks may have later ones."""
        return len(self.pieces)

    def padded(self, num_rounds: int) -> StagingLayout:
        """Returns the layout with empty rounds added up to `num_rounds`."""
        none: list[list[Any]] = [[] for _ in range(num_rounds - self.num_rounds)]
        return replace(
            self,
            sends=[*self.sends, *none],
            receives=[*self.receives, *none],
            pieces=[*self.pieces, *none],
        )


@collector_paused()
def lay_out(plan: TransferPlan, num_learners: int, rank: int) -> StagingLayout:
    """Lays out the messages of a group rank.

    A learner packs elements for several replicas once. Elements that a rollout rank relays are contiguous,
    channel by channel and learner by learner, so that they are sent as one message.
    """
    sending = rank < num_learners
    messages = plan.messages_of(rank)
    num_rounds = max((key.round + 1 for key in messages), default=0)
    sends: list[list[Slice]] = [[] for _ in range(num_rounds)]
    receives: list[list[Slice]] = [[] for _ in range(num_rounds)]
    rounds: list[list[tuple[Piece, int]]] = [[] for _ in range(num_rounds)]
    places: dict[object, int] = {}
    filled = [0] * num_rounds
    for key in sorted(messages, key=lambda key: (key.round, key.channel, key.sender, key.receiver)):
        if not sending and key.sender == rank:
            continue
        number, size = key.round, _size(messages[key])
        alike = plan.content_of(messages[key][0]) if sending else key
        begin = places.setdefault((number, alike), filled[number])
        own = sends if sending else receives
        own[number].append(Slice(key=key, slot=number % NUM_SLOTS, begin=begin, size=size))
        if begin == filled[number]:
            rounds[number] += [
                (piece, begin + piece.offset) for part in messages[key] for piece in plan.pieces_of(key, part)
            ]
            filled[number] += size
    if not sending:
        for key in sorted(key for key in messages if key.sender == rank):
            sends[key.round].append(
                _relayed(key, _size(messages[key]), receives[key.round - 1], num_learners)
            )
    sizes = [0] * NUM_SLOTS
    for message in (message for messages in (*sends, *receives) for message in messages):
        sizes[message.slot] = max(sizes[message.slot], message.begin + message.size)
    return StagingLayout(sends=sends, receives=receives, pieces=rounds, slot_sizes=tuple(sizes))


def _size(parts: Sequence[MessagePart]) -> int:
    return sum(part.size for part in parts)


def _relayed(key: MessageKey, size: int, received: Sequence[Slice], num_learners: int) -> Slice:
    """Returns the place in staging at which the content of a relayed message arrived, one round earlier."""
    parts = [part for part in received if part.key.channel == key.channel and part.key.sender < num_learners]
    begin = min(part.begin for part in parts)
    assert sum(part.size for part in parts) == size, "a relay passes on exactly what it received"
    return Slice(key=key, slot=(key.round - 1) % NUM_SLOTS, begin=begin, size=size)
