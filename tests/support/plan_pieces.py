"""The pieces of a transfer plan and who relays to whom, for tests that look at all ranks at once."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.weights.plan.plan import MessageKey, Piece, TransferPlan


def message_of(plan: TransferPlan, piece: Piece) -> MessageKey:
    """The message that carries a piece."""
    sender = piece.source if piece.relay is None else plan.num_sources + piece.relay
    return MessageKey(sender, plan.num_sources + piece.destination, piece.round, piece.channel)


def message_sizes(plan: TransferPlan) -> dict[MessageKey, int]:
    """Number of elements of every message of a push."""
    sizes: dict[MessageKey, int] = {}
    for rank in range(plan.num_sources + plan.num_destinations):
        for key, parts in plan.messages_of(rank).items():
            size = sum(part.size for part in parts)
            assert size == sizes.setdefault(key, size) > 0, "sender and receiver agree"
    return sizes


def all_pieces(plan: TransferPlan) -> Iterator[Piece]:
    """Those that learners send, by (source, members), then those that are relayed."""
    messages = {
        key: parts
        for rank in range(plan.num_sources + plan.num_destinations)
        for key, parts in plan.messages_of(rank).items()
    }
    for relayed in (False, True):
        ordered = sorted(
            (part.flow, part.start, key, part)
            for key, parts in messages.items()
            for part in parts
            if (key.sender >= plan.num_sources) is relayed
        )
        for _, _, key, part in ordered:
            yield from plan.pieces_of(key, part)


def pieces_from(plan: TransferPlan, source: int) -> list[Piece]:
    """The pieces that a learner rank sends."""
    parts = sorted((part, key) for key, parts in plan.messages_of(source).items() for part in parts)
    return [piece for part, key in parts for piece in plan.pieces_of(key, part)]


def pieces_to(plan: TransferPlan, destination: int) -> list[Piece]:
    """The pieces that a rollout rank receives, from learners and then from relays."""
    rank = plan.num_sources + destination
    parts = sorted(
        (key.sender >= plan.num_sources, part, key)
        for key, parts in plan.messages_of(rank).items()
        for part in parts
        if key.receiver == rank
    )
    return [piece for _, part, key in parts for piece in plan.pieces_of(key, part)]


def relay_pairs(plan: TransferPlan) -> tuple[tuple[int, int], ...]:
    """Group ranks of every rollout rank that relays and of each that it relays to, ascending."""
    pairs = {(key.sender, key.receiver) for key in message_sizes(plan) if key.sender >= plan.num_sources}
    return tuple(sorted(pairs))
