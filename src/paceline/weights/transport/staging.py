"""Computes where each message of a rank lies in its staging memory; any rank can do so for any other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from paceline.service.imports import without_collections
from paceline.weights.geometry.columns import IntArray
from paceline.weights.geometry.parameters import tensor_of
from paceline.weights.geometry.views import Views
from paceline.weights.plan.messages import MessageKey, MessageParts, ParameterPlaces
from paceline.weights.plan.plan import TransferPlan

NUM_SLOTS: Final = 2
"""Rounds in staging at a time: one is packed or scattered while the other is transferred."""


class Slice(NamedTuple):
    """A message's place in staging; `slot` is the parity of the round that fills it."""

    key: MessageKey
    slot: int
    begin: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagingLayout:
    """A rank's staging, in elements.

    Attributes:
        sends, receives: messages by round.
        places: where the rank's pieces lie in its parameters, round by round.
        at: offset of each piece in its round's slot, (pieces,).
        bounds: first piece of each round, followed by the number of pieces, (rounds + 1,).
    """

    sends: Sequence[Sequence[Slice]]
    receives: Sequence[Sequence[Slice]]
    places: ParameterPlaces
    at: IntArray
    bounds: IntArray
    slot_sizes: tuple[int, ...]

    @property
    def num_rounds(self) -> int:
        """Number of rounds until this rank's last message; other ranks may have later ones."""
        return len(self.sends)

    def padded(self, num_rounds: int) -> StagingLayout:
        """Returns the layout with empty rounds added up to `num_rounds`."""
        added = num_rounds - self.num_rounds
        return replace(
            self,
            sends=[*self.sends, *([] for _ in range(added))],
            receives=[*self.receives, *([] for _ in range(added))],
            bounds=np.pad(self.bounds, (0, added), mode="edge"),
        )

    def pieces(self, number: int) -> slice:
        """Returns which pieces belong to a round."""
        return slice(*self.bounds[number : number + 2].tolist())

    def staged(self, number: int, slots: Sequence[torch.Tensor]) -> Views:
        """Returns the elements of a round's pieces in these slots."""
        pieces = self.pieces(number)
        return Views.contiguous(slots[number % NUM_SLOTS], self.at[pieces], self.places.shape[pieces])

    def views(
        self, parameters: Mapping[str, torch.Tensor], slots: Sequence[torch.Tensor]
    ) -> Iterator[tuple[Views, Views]]:
        """Yields for each round the same elements in the rank's parameters and in staging."""
        places = self.places
        tensors = [tensor_of(parameters, name) for name in places.names]
        own = Views.of_boxes(tensors, places.name, places.start, places.shape)
        for number in range(self.num_rounds):
            yield own[self.pieces(number)], self.staged(number, slots)


@without_collections()
def lay_out(plan: TransferPlan, num_learners: int, rank: int) -> StagingLayout:
    """Lays out the messages of a group rank.

    A learner packs elements for several replicas once. Elements that a rollout rank relays are contiguous,
    channel by channel and learner by learner, so that they are sent as one message.
    """
    sending = rank < num_learners
    parts = plan.parts_of(rank)
    slices, filled = _placed(parts, plan.contents_of(parts) if sending else None)
    relayed = [] if sending else _relayed(plan, rank, slices)
    num_rounds = max((message.key.round + 1 for message in (*slices[-1:], *relayed)), default=0)
    count = np.diff(parts.first)
    pieces = plan.pieces_of(parts, np.flatnonzero(np.repeat(filled, count)))
    begins = np.array([message.begin for message in slices], dtype=np.int64)
    return StagingLayout(
        sends=_by_round(slices if sending else relayed, num_rounds),
        receives=_by_round([] if sending else slices, num_rounds),
        places=plan.sources_of(pieces) if sending else plan.targets_of(pieces, rank - num_learners),
        at=np.repeat(begins, count)[pieces.part] + pieces.offset,
        bounds=np.searchsorted(parts.round[pieces.part], np.arange(num_rounds + 1)),
        slot_sizes=tuple(
            max((message.begin + message.size for message in slices if message.slot == slot), default=0)
            for slot in range(NUM_SLOTS)
        ),
    )


def _placed(parts: MessageParts, contents: IntArray | None) -> tuple[list[Slice], npt.NDArray[np.bool_]]:
    """Places messages one after another in their rounds' slots; says which are not copies of earlier ones.

    Args:
        contents: a number for each message, equal for messages of a round with equal elements, which share a
            place. None: all differ.
    """
    first = parts.first[:-1]
    rounds, sizes = parts.round[first], np.add.reduceat(parts.size, first) if len(first) else first
    original = own = np.arange(len(first))
    if contents is not None:
        alike = rounds * (contents.max(initial=0) + 1) + contents
        _, index, which = np.unique(alike, return_index=True, return_inverse=True)
        original = index[which]
    filling = np.where(original == own, sizes, 0)
    begins = np.cumsum(filling) - filling
    begins = (begins - begins[np.searchsorted(rounds, rounds)])[original]
    columns = (parts.keys(first), (rounds % NUM_SLOTS).tolist(), begins.tolist(), sizes.tolist())
    return list(map(Slice._make, zip(*columns, strict=True))), original == own


def _relayed(plan: TransferPlan, rank: int, received: Iterable[Slice]) -> list[Slice]:
    """Returns what a rollout rank relays: what arrived from learners one round earlier, where it lies."""
    arrived: dict[tuple[int, int], tuple[int, int]] = {}
    for (sender, _, number, channel), _, begin, size in received:
        if channel and sender < plan.num_sources:
            first, known = arrived.get((number, channel), (begin, 0))
            assert first + known == begin, "what a rank relays is contiguous"
            arrived[number, channel] = first, known + size
    members = {channel: ranks for ranks, channel in plan.channels.items()}
    return sorted(
        Slice(MessageKey(rank, plan.num_sources + member, number + 1, channel), number % NUM_SLOTS, *place)
        for (number, channel), place in arrived.items()
        for member in members[channel]
        if plan.num_sources + member != rank
    )


def _by_round(messages: Iterable[Slice], num_rounds: int) -> list[list[Slice]]:
    rounds: list[list[Slice]] = [[] for _ in range(num_rounds)]
    for message in messages:
        rounds[message.key.round].append(message)
    return rounds
