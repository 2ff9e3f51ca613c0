"""The transfer plan: every piece that moves in a weight push, from whom, to whom, in which round.

The plan is a pure function of the layouts, the element size and the round's size. Every rank computes it for
itself from the same bytes; the fingerprints are compared when the group forms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgpack

from paceline.core.errors import WeightSyncError
from paceline.reshard.boxes import Box
from paceline.reshard.cover import Need, assign_sources
from paceline.reshard.layout import RankLayout, TensorSlice, expand_whole, tensor_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One box of one tensor on its way from a source to a destination.

    Attributes:
        source, destination: index among the learner ranks, index among the rollout ranks.
        round: number of the round whose message carries it.
        offset: its first element in that (source, destination, round) message, in elements.
        name: the tensor; box: the part, in global indices.
        source_param, source_box: where the sender finds it; destination_param, destination_box: where it lands.
    """

    source: int
    destination: int
    round: int
    offset: int
    name: str
    box: Box
    source_param: str
    source_box: Box
    destination_param: str
    destination_box: Box


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """All pieces of a push, ordered by (source, destination, round, offset)."""

    num_sources: int
    num_destinations: int
    num_rounds: int
    item_bytes: int
    pieces: tuple[Piece, ...]

    @cached_property
    def message_sizes(self) -> dict[tuple[int, int, int], int]:
        """Elements of every message that is not empty, by (source, destination, round)."""
        sizes: dict[tuple[int, int, int], int] = {}
        for piece in self.pieces:
            key = (piece.source, piece.destination, piece.round)
            sizes[key] = sizes.get(key, 0) + piece.box.volume
        return sizes

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that are equal exactly if the plans are."""
        hasher = hashlib.sha256()
        hasher.update(
            msgpack.packb([self.num_sources, self.num_destinations, self.num_rounds, self.item_bytes])
        )
        for p in self.pieces:
            boxes = [p.box, p.source_box, p.destination_box]
            plain = [p.source, p.destination, p.round, p.offset, p.name, p.source_param, p.destination_param]
            hasher.update(msgpack.packb([*plain, *([*box.start, *box.stop] for box in boxes)]))
        return hasher.digest()

    def of_source(self, source: int) -> list[Piece]:
        """What this learner rank sends."""
        return [piece for piece in self.pieces if piece.source == source]

    def of_destination(self, destination: int) -> list[Piece]:
        """What this rollout rank receives."""
        return [piece for piece in self.pieces if piece.destination == destination]

    def sent_bytes(self, source: int) -> int:
        """Bytes that leave this learner rank in a push."""
        return self.item_bytes * sum(n for (s, _, _), n in self.message_sizes.items() if s == source)

    def received_bytes(self, destination: int) -> int:
        """Bytes that reach this rollout rank in a push."""
        return self.item_bytes * sum(n for (_, d, _), n in self.message_sizes.items() if d == destination)


def build_plan(
    sources: Sequence[RankLayout], destinations: Sequence[RankLayout], *, item_bytes: int, round_bytes: int
) -> TransferPlan:
    """Intersects what learner ranks hold with what rollout ranks need.

    Args:
        sources: one layout per learner rank.
        destinations: one layout per rollout rank; `whole` ones are expanded to every tensor.
        item_bytes: bytes per element on the wire.
        round_bytes: most bytes that one message, so one (source, destination) pair in one round, may carry.

    Raises:
        WeightSyncError: a needed part is held by nobody, a held tensor is needed by nobody, two slices
            land in the same place, or a round is too small for one element.
    """
    capacity = round_bytes // item_bytes
    if capacity < 1:
        raise WeightSyncError(f"round_bytes is {round_bytes}; it must hold at least one element")
    shapes = tensor_shapes([*sources, *destinations])
    learner_shapes = tensor_shapes(sources)
    destinations = [expand_whole(layout, learner_shapes) for layout in destinations]
    _check_all_used(learner_shapes, destinations)
    needs: list[Need] = []
    wanted: list[tuple[int, TensorSlice]] = []
    for rank, layout in enumerate(destinations):
        _check_disjoint(rank, layout)
        for part in layout.slices:
            shape, label = part.global_shape, f"rollout rank {rank}"
            needs.append(Need(name=part.name, global_shape=shape, box=part.box, label=label))
            wanted.append((rank, part))
    order = {name: index for index, name in enumerate(shapes)}
    flows: dict[tuple[int, int], list[tuple[int, Box, TensorSlice, TensorSlice]]] = {}
    for supply in assign_sources(sources, needs):
        rank, part = wanted[supply.need]
        flow = flows.setdefault((supply.source, rank), [])
        flow.append((order[part.name], supply.box, supply.held, part))
    pieces: list[Piece] = []
    for (source, rank), flow in sorted(flows.items()):
        flow.sort(key=lambda item: (item[0], item[1]))
        pieces += _pack_rounds(source, rank, flow, capacity)
    return TransferPlan(
        num_sources=len(sources),
        num_destinations=len(destinations),
        num_rounds=max((piece.round + 1 for piece in pieces), default=0),
        item_bytes=item_bytes,
        pieces=tuple(pieces),
    )


def _pack_rounds(
    source: int, rank: int, flow: Sequence[tuple[int, Box, TensorSlice, TensorSlice]], capacity: int
) -> Iterator[Piece]:
    """Fills one pair's messages in order, cutting boxes along rows where a message is full."""
    number, filled = 0, 0
    for _, whole, held, part in flow:
        stack = [whole]
        while stack:
            box = stack.pop()
            fit, rest = take_leading(box, capacity - filled, can_wait=filled > 0)
            stack += reversed(rest)
            if fit is None:
                number, filled = number + 1, 0
                continue
            yield Piece(
                source=source,
                destination=rank,
                round=number,
                offset=filled,
                name=part.name,
                box=fit,
                source_param=held.param,
                source_box=held.to_local(fit),
                destination_param=part.param,
                destination_box=part.to_local(fit),
            )
            filled += fit.volume


def take_leading(box: Box, room: int, *, can_wait: bool) -> tuple[Box | None, list[Box]]:
    """Cuts off the leading part of a box that fits into `room` elements, and what is left, in order.

    Whole rows where at least one fits. Where none does, nothing is taken if a fresh message `can_wait`;
    otherwise the row itself is cut, along the next dimension.
    """
    if box.volume <= room:
        return box, []
    for dim, extent in enumerate(box.shape):
        row = box.volume // extent
        if row <= room:
            fit, rest = box.split(dim, box.start[dim] + room // row)
            return fit, [rest]
        if can_wait:
            return None, [box]
        first, others = box.split(dim, box.start[dim] + 1)
        if others.volume:
            fit_first, rest_first = take_leading(first, room, can_wait=False)
            return fit_first, [*rest_first, others]
    raise AssertionError("a box of one element is larger than a round, which build_plan refuses")


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
