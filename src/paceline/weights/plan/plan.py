"""Plans the transfer of every piece in a weight push: its source, relay, destination and round.

The plan is a pure function of the layouts, the element size, the size of a round and the relay mode. Every
rank computes it from the same bytes; the fingerprints are compared when the group forms.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import msgpack
import numpy as np

from paceline.core.errors import WeightSyncError
from paceline.service.imports import without_collections
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.columns import IntArray, ranges
from paceline.weights.geometry.layout import RankLayout, RankPlace, expand_all
from paceline.weights.geometry.sharding import Sharding
from paceline.weights.plan.chunks import Chunks, cut_into_chunks
from paceline.weights.plan.flows import SMALLEST_SHARE, Demand, Flows, Members
from paceline.weights.plan.messages import MessageParts, ParameterPlaces, Pieces, SliceEnd
from paceline.weights.plan.rounds import chunk_sizes

RELAY_MODES: Final = ("auto", "never", "always")

PLAN_SCHEMA: Final = 2
"""Raise this when the plan for the same layouts changes, so that ranks of other versions are refused."""

_ROUND_COST_BYTES: Final = 64 << 20
"""Bytes that a link carries in the time it takes to start and end a round (0.2 ms at 350 GB/s)"""

_NETWORK_COST: Final = 8
"""How much longer a byte takes over a node's network (50 GB/s) than over a rank's link (400 GB/s)"""


@dataclass(frozen=True, slots=True, eq=False)
class Cargo:
    """Holds the chunks that a flow carries.

    Attributes:
        number: a number of the content, for each plan.
        chunks: how its boxes are cut.
        columns: need, row of the cover, and offset of each chunk, then its start in each dimension of the
            tensor, and its extents: (3 + 2 dims, chunks).
    """

    number: int
    chunks: Chunks
    columns: IntArray


@dataclass(frozen=True, kw_only=True, eq=False)
class TransferPlan:
    """Says which piece goes from whom to whom in a push.

    Every rank knows all flows and their chunk sizes. A flow is cut into chunks on request, so a rank cuts
    only its own flows.

    A chunk gives one piece for the member that receives it from the learner, and one for each member to which
    this receiver relays it. A relay passes on everything that it received over a channel in a round, in the
    same order: learner by learner.

    Attributes:
        sizes: largest number of elements in a chunk of each flow.
        layouts: a digest of all layouts.
        nodes: a number for each rank of the group; equal for ranks of one node.
    """

    num_sources: int
    num_destinations: int
    item_bytes: int
    flows: Flows
    sizes: Sequence[int]
    layouts: bytes
    nodes: tuple[int, ...]
    _cargo: dict[tuple[tuple[int, ...], int], Cargo] = field(default_factory=dict, init=False)
    _chunks: dict[tuple[bytes, int], Chunks] = field(default_factory=dict, init=False)

    @cached_property
    def channels(self) -> dict[Members, int]:
        """The channel of each set of rollout ranks; sets of one rank have none."""
        sets = sorted({flow.members for flow in self.flows.flows if len(flow.members) > 1})
        return {members: 1 + index for index, members in enumerate(sets)}

    @property
    def num_channels(self) -> int:
        """Number of channels, with channel 0."""
        return 1 + len(self.channels)

    @cached_property
    def num_rounds(self) -> int:
        """Number of rounds of the push. Cuts all flows; ranks do not need it for their own parts."""
        ends = (
            -(-len(self.cargo(number).chunks.sizes) // len(flow.members)) + (len(flow.members) > 1)
            for number, flow in enumerate(self.flows.flows)
        )
        return max(ends, default=0)

    def cargo(self, number: int) -> Cargo:
        """Returns what a flow carries. Equal contents are looked up once, equal shapes are cut once."""
        flow, size = self.flows.flows[number], self.sizes[number]
        cargo = self._cargo.get((flow.content, size))
        if cargo is None:
            cover = self.flows.cover
            need, row = self.flows.cargo(flow)
            shapes = cover.shape_numbers[cover.box[row]].tobytes(), size
            if shapes not in self._chunks:
                self._chunks[shapes] = cut_into_chunks(cover.shapes[cover.box[row]], size)
            cut = self._chunks[shapes]
            start = cover.starts[cover.box[row[cut.item]]] + cut.start
            columns = np.vstack([need[cut.item], row[cut.item], cut.offset, start.T, cut.shape.T])
            cargo = self._cargo[flow.content, size] = Cargo(len(self._cargo), cut, columns)
        return cargo

    @cached_property
    def _flows_of(self) -> dict[int, list[int]]:
        """Numbers of the flows of each group rank, ascending."""
        flows: dict[int, list[int]] = {}
        for number, flow in enumerate(self.flows.flows):
            for rank in (flow.source, *(self.num_sources + member for member in flow.members)):
                flows.setdefault(rank, []).append(number)
        return flows

    def parts_of(self, rank: int) -> MessageParts:
        """Returns the parts of all messages that a learner rank sends or a rollout rank receives."""
        parts = [self._parts_of_flow(number, rank) for number in self._flows_of.get(rank, [])]
        return MessageParts.of(np.concatenate([np.zeros((8, 0), dtype=np.int64), *parts], axis=1))

    def _parts_of_flow(self, number: int, rank: int) -> IntArray:
        """Returns one flow's columns for `MessageParts.of`; each source begins with a different member.

        That spreads the remainders of the last round.
        """
        flow, chunks = self.flows.flows[number], self.cargo(number).chunks
        index = np.arange(len(chunks.sizes))
        count = len(flow.members)
        first = self.num_sources + np.array(flow.members)[(index + flow.source) % count]
        relayed = (first != rank) & (rank >= self.num_sources)
        return np.stack(
            [
                index // count + relayed,
                np.full_like(index, self.channels.get(flow.members, 0)),
                np.where(relayed, first, flow.source),
                np.full_like(index, rank) if rank >= self.num_sources else first,
                np.full_like(index, number),
                chunks.first[:-1],
                chunks.first[1:],
                chunks.sizes,
            ]
        )

    def _relayed_sizes(self, number: int, member: int) -> IntArray:
        """Returns the elements of each message of a flow that one of its members receives first."""
        flow = self.flows.flows[number]
        count = len(flow.members)
        return self.cargo(number).chunks.sizes[(flow.members.index(member) - flow.source) % count :: count]

    def relay_pairs_of(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Returns the pairs (relay, receiver) of group ranks that include this rank, ascending."""
        if rank < self.num_sources:
            return ()
        own = rank - self.num_sources
        pairs = {
            (self.num_sources + relay, self.num_sources + member)
            for number in self._flows_of.get(rank, [])
            for relay in self.flows.flows[number].members
            if len(self._relayed_sizes(number, relay))
            for member in self.flows.flows[number].members
            if relay != member and own in (relay, member)
        }
        return tuple(sorted(pairs))

    @cached_property
    def fingerprint(self) -> bytes:
        """Returns 32 bytes that are equal exactly if the plans are equal.

        Chunks follow from layouts, flows and their sizes.
        """
        hasher = hashlib.sha256()
        head = [PLAN_SCHEMA, self.num_sources, self.num_destinations, self.item_bytes]
        sets = {members: index for index, members in enumerate({f.members: 0 for f in self.flows.flows})}
        rows = [
            (flow.source, sets[flow.members], flow.volume, size)
            for flow, size in zip(self.flows.flows, self.sizes, strict=True)
        ]
        hasher.update(msgpack.packb([*head, list(sets), rows]))
        hasher.update(self.layouts)
        return hasher.digest()

    def pieces_of(self, parts: MessageParts, chosen: IntArray) -> Pieces:
        """Returns the pieces of the chosen parts, part by part."""
        numbers, flow = np.unique(parts.flow[chosen], return_inverse=True)
        dims = self.flows.cover.sharding.num_dims
        tables = [np.zeros((3 + 2 * dims, 0), np.int64), *(self.cargo(n).columns for n in numbers.tolist())]
        before = np.cumsum([table.shape[1] for table in tables])
        first, count = before[flow] + parts.start[chosen], (parts.stop - parts.start)[chosen]
        part, chunk = ranges(first, count)
        columns = np.concatenate(tables, axis=1)[:, chunk]
        return Pieces(
            part=chosen[part],
            need=columns[0],
            row=columns[1],
            offset=columns[2] + parts.lead[chosen][part],
            start=columns[3 : 3 + dims].T,
            shape=columns[3 + dims :].T,
        )

    def contents_of(self, parts: MessageParts) -> IntArray:
        """Returns a number for each part, equal for parts of equal elements."""
        flows, which = np.unique(parts.flow, return_inverse=True)
        cargo = np.array([self.cargo(number).number for number in flows.tolist()], dtype=np.int64)[which]
        return cargo * (1 + int(parts.stop.max(initial=0))) + parts.start

    def sources_of(self, pieces: Pieces) -> ParameterPlaces:
        """Returns where the learner reads pieces."""
        cover = self.flows.cover

        def end(key: int) -> SliceEnd:
            need, row = divmod(key, len(cover.part))
            part = cover.part_of(need, row)
            return SliceEnd(part.param or cover.needs[need].name, part.box.start, part.offset)

        return ParameterPlaces.of(pieces, pieces.need * len(cover.part) + pieces.row, end)

    def targets_of(self, pieces: Pieces, destination: int) -> ParameterPlaces:
        """Returns where a rollout rank writes pieces."""

        def end(need: int) -> SliceEnd:
            part = self.flows.slice_of(need, destination)
            return SliceEnd(part.param, part.box.start, part.offset)

        return ParameterPlaces.of(pieces, pieces.need, end)

    def sent_bytes(self, source: int) -> int:
        """Returns the bytes that leave this learner rank in a push."""
        flows = (self.flows.flows[number] for number in self._flows_of.get(source, []))
        return self.item_bytes * sum(flow.volume for flow in flows)

    def received_bytes(self, destination: int) -> int:
        """Returns the bytes that reach this rollout rank in a push."""
        numbers = self._flows_of.get(self.num_sources + destination, [])
        return self.item_bytes * sum(self.flows.flows[number].volume for number in numbers)

    def relayed_bytes(self, destination: int) -> int:
        """Returns the bytes that this rollout rank relays in a push."""
        flows = self.flows.flows
        return self.item_bytes * sum(
            (len(flows[number].members) - 1) * int(self._relayed_sizes(number, destination).sum())
            for number in self._flows_of.get(self.num_sources + destination, [])
        )

    @cached_property
    def cost_bytes(self) -> int:
        """Estimates how long a push takes, in bytes over the link of one rank.

        The busiest rank's link or the busiest node's network bounds the push; rounds are about equal. Members
        of a set share the relaying.
        """
        sources, members = self.nodes[: self.num_sources], self.nodes[self.num_sources :]
        sent, received, relayed = Counter[int](), Counter[int](), Counter[int]()
        out, into = Counter[int](), Counter[int]()
        num_rounds = 0
        volumes = defaultdict[Members, Counter[int]](Counter)
        for flow, most in zip(self.flows.flows, self.sizes, strict=True):
            count = len(flow.members)
            num_rounds = max(num_rounds, -(-flow.volume // (most * count)) + (count > 1))
            sent[flow.source] += flow.volume
            volumes[flow.members][sources[flow.source]] += flow.volume
        for ranks, by_node in volumes.items():
            count, volume = len(ranks), sum(by_node.values())
            of_node = Counter(members[rank] for rank in ranks)
            for rank in ranks:
                received[rank] += volume
                relayed[rank] += volume * (count - 1) // count
            for node, number in of_node.items():
                # A member gets its own share from learners, and the shares of members on other nodes.
                others = volume - by_node[node] + volume * (count - number)
                into[node] += number * others // count
                out[node] += number * (count - number) * volume // count
            for node, load in by_node.items():
                out[node] += load * (count - of_node[node]) // count
        ends = (max(part.values(), default=0) for part in (sent, received, relayed))
        network = _NETWORK_COST * max(*out.values(), *into.values(), 0, 0)
        return self.item_bytes * max(*ends, network) + _ROUND_COST_BYTES * num_rounds


@without_collections()
def build_plan(
    sources: Sequence[RankLayout],
    destinations: Sequence[RankLayout],
    *,
    item_bytes: int,
    round_bytes: int,
    relay: str = "never",
) -> TransferPlan:
    """Intersects the boxes that learner ranks hold with those that rollout ranks need.

    Args:
        sources: one layout per learner rank.
        destinations: one layout per rollout rank; those of the general path are expanded to every tensor.
        round_bytes: largest number of bytes that a rank packs, or receives, in one round.
        relay: whether rollout ranks that need the same box relay it to each other. "auto": if `cost_bytes` is
            lower; "always": if two ranks on a node need the same box (for tests).

    Raises:
        WeightSyncError: no source holds a needed part, no destination needs a tensor, two slices are written
            to the same place, or a round is too small for one element.
    """
    if relay not in RELAY_MODES:
        raise ValueError(f"relay {relay!r} is none of {', '.join(RELAY_MODES)}")
    capacity = round_bytes // item_bytes
    if capacity < 1:
        raise WeightSyncError(f"round_bytes is {round_bytes}; it must hold at least one element")
    sharding = Sharding.of(sources)
    nodes = _number_nodes([*sharding.places, *(layout.place for layout in destinations)])
    destinations = _checked(destinations, sharding)
    digest = _digest_of(sharding, [layout for _, layout in _different(destinations)])
    nobody = [0] * len(destinations)
    by_node = nodes[len(sharding) :]
    demand = Demand.of(sharding, destinations, nobody)
    # If learners hold several copies, each node is served by its own copy.
    near = Demand.of(sharding, destinations, by_node) if sharding.has_copies else demand

    def plan(demand: Demand, together: Sequence[int], smallest_share: float = 0.0) -> TransferPlan:
        flows = demand.flows(together=together, smallest_share=smallest_share)
        return TransferPlan(
            num_sources=len(sharding),
            num_destinations=len(destinations),
            item_bytes=item_bytes,
            flows=flows,
            sizes=chunk_sizes(flows.flows, capacity),
            layouts=digest,
            nodes=nodes,
        )

    if relay == "always":
        return plan(near, by_node)
    direct = plan(near, range(len(destinations)))
    candidates = [direct]
    if relay == "auto" and _egress_binds(direct):
        candidates.append(plan(demand, nobody, SMALLEST_SHARE))
    # A slice that several ranks of a node need should cross the network once.
    if relay == "auto" and len(set(nodes)) > 1 and len(set(by_node)) < len(by_node):
        candidates.append(plan(near, by_node, SMALLEST_SHARE))
    return min(candidates, key=lambda candidate: candidate.cost_bytes)


def _checked(destinations: Sequence[RankLayout], sharding: Sharding) -> Sequence[RankLayout]:
    """Expands the destinations of the general path; raises WeightSyncError if one does not fit."""
    for rank, layout in _different(destinations):
        _check_shapes(rank, layout, sharding)
    expanded = expand_all(destinations, sharding.shapes)
    different = _different(expanded)
    for rank, layout in different:
        _check_disjoint(rank, layout)
    _check_all_used(sharding.shapes, [layout for _, layout in different])
    return expanded


def _egress_binds(plan: TransferPlan) -> bool:
    """Returns whether a learner rank sends more than any rollout rank receives: only then relaying helps."""
    sent = max((plan.sent_bytes(source) for source in range(plan.num_sources)), default=0)
    return sent > max((plan.received_bytes(rank) for rank in range(plan.num_destinations)), default=0)


def _different(layouts: Sequence[RankLayout]) -> list[tuple[int, RankLayout]]:
    """Returns each distinct layout with its first rank; places are ignored."""
    ranks: dict[int, tuple[int, RankLayout]] = {}
    for rank, layout in enumerate(layouts):
        ranks.setdefault(id(layout.slices), (rank, layout))
    return list(ranks.values())


def _number_nodes(places: Iterable[RankPlace]) -> tuple[int, ...]:
    """Returns a number for each rank that is equal for ranks of one node."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(place.node, len(numbers)) for place in places)


def _digest_of(sharding: Sharding, destinations: Sequence[RankLayout]) -> bytes:
    """Returns a digest of all layouts: tensors, parameters and places in them."""
    hasher = hashlib.sha256(sharding.slices_to_bytes())
    for layout in destinations:
        hasher.update(layout.slices_to_bytes())
    return hasher.digest()


def _check_shapes(rank: int, layout: RankLayout, sharding: Sharding) -> None:
    for part in layout.slices:
        known = sharding.shapes.get(part.name, part.global_shape)
        if known != part.global_shape:
            raise WeightSyncError(
                f"{part.name}: rollout rank {rank} gives shape {part.global_shape}, the learner {known}; "
                "the two sides do not run the same model"
            )


def _check_all_used(shapes: Mapping[str, tuple[int, ...]], destinations: Sequence[RankLayout]) -> None:
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
