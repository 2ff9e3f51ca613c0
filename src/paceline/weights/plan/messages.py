"""Columns for what one rank exchanges: parts of messages, pieces in them, and where they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline.weights.geometry.columns import IntArray, padded


class MessageKey(NamedTuple):
    """One message between two ranks of the group (learners come first).

    Channel 0 carries elements that nobody relays; each other channel carries the common needs of one set of
    rollout ranks.
    """

    sender: int
    receiver: int
    round: int
    channel: int


@dataclass(frozen=True, slots=True, eq=False)
class MessageParts:
    """Parts of messages as columns, by (round, channel, sender, receiver, flow).

    A part is what one flow puts into a message; a relay passes on the parts of several.

    Attributes:
        first: first part of each message, followed by the number of parts, (messages + 1,).
        round, channel, sender, receiver: the message; see `MessageKey`.
        start, stop: range of the flow's chunks.
        size, lead: number of elements, and the index of the first of them in the message.
    """

    first: IntArray
    round: IntArray
    channel: IntArray
    sender: IntArray
    receiver: IntArray
    flow: IntArray
    start: IntArray
    stop: IntArray
    size: IntArray
    lead: IntArray

    @classmethod
    def of(cls, columns: IntArray) -> MessageParts:
        """Makes parts from the columns from `round` to `size`, (8, parts), in which flows are in order."""
        message = np.ravel_multi_index(tuple(columns[:4]), columns[:4].max(axis=1, initial=0) + 1)
        order = np.argsort(message, kind="stable")
        number, channel, sender, receiver, flow, start, stop, size = columns[:, order]
        first = np.append(np.flatnonzero(np.diff(message[order], prepend=-1)), len(order))
        before = np.cumsum(size) - size
        lead = before - np.repeat(before[first[:-1]], np.diff(first))
        return cls(first, number, channel, sender, receiver, flow, start, stop, size, lead)

    def keys(self, rows: IntArray) -> list[MessageKey]:
        """Returns the messages to which some parts belong."""
        columns = (self.sender, self.receiver, self.round, self.channel)
        return list(map(MessageKey._make, zip(*(column[rows].tolist() for column in columns), strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """Pieces of messages as columns: boxes of tensors on their way to one destination each.

    Attributes:
        part: the row of the message's part in `MessageParts`.
        offset: index of the first element in the message.
        need, row: the need, and the row of the cover that supplies it.
        start, shape: first index and extents in the tensor, (pieces, dims).
    """

    part: IntArray
    offset: IntArray
    need: IntArray
    row: IntArray
    start: IntArray
    shape: IntArray


class SliceEnd(NamedTuple):
    """A slice's parameter, and its first index in the tensor and in that parameter."""

    param: str
    start: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterPlaces:
    """Where pieces lie in a rank's parameters, as columns.

    Attributes:
        name: index of each piece's parameter in `names`.
        start, shape: first index and extents in that parameter, (pieces, dims).
    """

    names: Sequence[str]
    name: IntArray
    start: IntArray
    shape: IntArray

    @classmethod
    def of(
        cls,
        pieces: Pieces,
        keys: IntArray,
        end_of: Callable[[int], SliceEnd],
    ) -> ParameterPlaces:
        """Returns the places of pieces.

        Args:
            keys: the number of each piece's slice.
            end_of: returns where a slice lies.
        """
        distinct, which = np.unique(keys, return_inverse=True)
        ends = [end_of(key) for key in distinct.tolist()]
        names: dict[str, int] = {}
        name = np.array([names.setdefault(end.param, len(names)) for end in ends], dtype=np.int64)
        dims = pieces.start.shape[1]
        moved = padded([end.offset for end in ends], dims) - padded([end.start for end in ends], dims)
        return cls(names=list(names), name=name[which], start=pieces.start + moved[which], shape=pieces.shape)
