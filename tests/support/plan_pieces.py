"""The pieces of a transfer plan as objects, for tests that look at all ranks at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from paceline.weights.geometry.boxes import Box
from paceline.weights.plan.messages import MessageKey, ParameterPlaces
from paceline.weights.plan.plan import TransferPlan
from paceline.weights.transport.staging import lay_out


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


def message_of(plan: TransferPlan, piece: Piece) -> MessageKey:
    """The message that carries a piece."""
    sender = piece.source if piece.relay is None else plan.num_sources + piece.relay
    return MessageKey(sender, plan.num_sources + piece.destination, piece.round, piece.channel)


def message_sizes(plan: TransferPlan) -> dict[MessageKey, int]:
    """Number of elements of every message of a push."""
    sent, received = (
        {
            message.key: message.size
            for rank in range(plan.num_sources + plan.num_destinations)
            for messages in getattr(lay_out(plan, plan.num_sources, rank), side)
            for message in messages
        }
        for side in ("sends", "receives")
    )
    assert sent == received, "sender and receiver agree"
    assert min(sent.values(), default=1) > 0
    return sent


def _numbered(plan: TransferPlan, rank: int) -> Iterator[tuple[int, int, MessageKey, Piece]]:
    """What a learner rank sends or a rollout rank receives, with the flow and the first chunk of its part."""
    parts = plan.parts_of(rank)
    for receiver in np.unique(parts.receiver).tolist():
        (chosen,) = np.nonzero(parts.receiver == receiver)
        destination = receiver - plan.num_sources
        pieces = plan.pieces_of(parts, chosen)
        sources, targets = plan.sources_of(pieces), plan.targets_of(pieces, destination)
        for index, part in enumerate(pieces.part.tolist()):
            flow, need = int(parts.flow[part]), int(pieces.need[index])
            slices = plan.flows.cover.needs[need]
            (key,) = parts.keys(np.array([part]))
            dims = len(slices.global_shape)
            low, extents = pieces.start[index].tolist(), pieces.shape[index].tolist()
            assert all(extent == 1 for extent in extents[dims:])
            source, target = (_place(places, index, dims) for places in (sources, targets))
            yield (
                flow,
                int(parts.start[part]),
                key,
                Piece(
                    source=plan.flows.flows[flow].source,
                    relay=None if key.sender < plan.num_sources else key.sender - plan.num_sources,
                    destination=destination,
                    round=key.round,
                    channel=key.channel,
                    offset=int(pieces.offset[index]),
                    name=slices.name,
                    box=_box(low[:dims], extents),
                    source_param=source[0],
                    source_box=source[1],
                    destination_param=target[0],
                    destination_box=target[1],
                ),
            )


def _place(places: ParameterPlaces, index: int, dims: int) -> tuple[str, Box]:
    low = places.start[index].tolist()
    return places.names[places.name[index]], _box(low[:dims], places.shape[index].tolist())


def _box(start: list[int], extents: list[int]) -> Box:
    return Box(tuple(start), tuple(low + extent for low, extent in zip(start, extents, strict=False)))


def _in_order(pieces: Iterable[tuple[int, int, MessageKey, Piece]]) -> list[Piece]:
    return [piece for *_, piece in sorted(pieces, key=lambda item: item[:3])]


def all_pieces(plan: TransferPlan) -> Iterator[Piece]:
    """Those that learners send, by (source, members), then those that are relayed."""
    ranks = range(plan.num_sources, plan.num_sources + plan.num_destinations)
    received = [item for rank in ranks for item in _numbered(plan, rank)]
    for relayed in (False, True):
        yield from _in_order(item for item in received if (item[3].relay is not None) is relayed)


def pieces_from(plan: TransferPlan, source: int) -> list[Piece]:
    """The pieces that a learner rank sends."""
    return _in_order(_numbered(plan, source))


def pieces_to(plan: TransferPlan, destination: int) -> list[Piece]:
    """The pieces that a rollout rank receives, from learners and then from relays."""
    received = list(_numbered(plan, plan.num_sources + destination))
    return [
        piece
        for relayed in (False, True)
        for piece in _in_order(item for item in received if (item[3].relay is not None) is relayed)
    ]


def relay_pairs(plan: TransferPlan) -> tuple[tuple[int, int], ...]:
    """Group ranks of every rollout rank that relays and of each that it relays to, ascending."""
    pairs = {(key.sender, key.receiver) for key in message_sizes(plan) if key.sender >= plan.num_sources}
    return tuple(sorted(pairs))
