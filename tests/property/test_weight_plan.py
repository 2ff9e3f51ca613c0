"""For any sharding the plan moves every needed element exactly once, evenly, and digests add up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.weights.digest.agreement import (
    DigestReport,
    SliceDigest,
    digest_atoms,
    disagreement,
    model_digest,
)
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, RankPlace, TensorSlice
from paceline.weights.plan.messages import MessageKey
from paceline.weights.plan.plan import RELAY_MODES, TransferPlan, build_plan
from support.naive_plan import naive_plan
from support.plan_pieces import all_pieces, message_of, message_sizes, pieces_from, pieces_to, relay_pairs
from support.reference_digest import digest_array
from support.weight_layouts import DenseModel, fsdp_layout, tp_layout

Arrays = dict[str, np.ndarray]


@st.composite
def dense_models(draw: st.DrawFn) -> tuple[DenseModel, int]:
    """A model and a TP degree that divides it; the KV heads may be fewer than the ranks."""
    size = draw(st.sampled_from([1, 2, 4, 8]))
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    heads = math.lcm(size, kv_heads) * draw(st.integers(1, 2))
    model = DenseModel(
        # Padded to a multiple of 64, so that ranks may have padding in part, or nothing else.
        vocab_size=draw(st.integers(1, 70)),
        hidden=draw(st.integers(1, 7)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 2)),
        intermediate=size * draw(st.integers(1, 3)),
        layers=draw(st.integers(1, 2)),
        tied=draw(st.booleans()),
        bias=draw(st.booleans()),
    )
    return model, size


def full_tensors(model: DenseModel) -> Arrays:
    """Every element of the model has its own value."""
    tensors, at = {}, 1
    for name, shape in model.shapes().items():
        n = math.prod(shape)
        tensors[name] = np.arange(at, at + n, dtype=np.int32).reshape(shape).view(np.float32)
        at += n
    return tensors


@pytest.mark.timeout(900)
@settings(max_examples=60, deadline=None)
@given(
    case=dense_models(),
    num_learners=st.integers(1, 6),
    replicas=st.integers(1, 3),
    num_servers=st.integers(1, 3),
    round_bytes=st.integers(12, 1 << 14),
    relay=st.sampled_from(RELAY_MODES),
)
# Two ranks need different things, but the same of one learner.
@example(
    case=(
        DenseModel(
            vocab_size=49,
            hidden=1,
            heads=8,
            kv_heads=2,
            head_dim=1,
            intermediate=8,
            layers=1,
            tied=False,
            bias=False,
        ),
        8,
    ),
    num_learners=4,
    replicas=1,
    num_servers=1,
    round_bytes=24,
    relay="auto",
)
def test_the_plan_is_the_one_that_the_naive_planner_makes(
    case: tuple[DenseModel, int],
    num_learners: int,
    replicas: int,
    num_servers: int,
    round_bytes: int,
    relay: str,
) -> None:
    """With learner replicas too, whose parts are contested."""
    model, size = case
    sources = [
        fsdp_layout(model.shapes(), rank=rank, world_size=num_learners, dtype="float32")
        for _ in range(replicas)
        for rank in range(num_learners)
    ]
    layouts = [tp_layout(model, rank, size)[0] for rank in range(size)] * num_servers
    check_same(sources, layouts, round_bytes=round_bytes, relay=relay)


def test_large_replicated_tensors_are_cut_as_the_naive_planner_cuts_them() -> None:
    shapes = {f"layer{number}.w": (300, 300 - number % 2) for number in range(4)}
    sources = [fsdp_layout(shapes, rank=r % 2, world_size=2, dtype="float32") for r in range(6)]
    layout = fsdp_layout(shapes, rank=0, world_size=1, dtype="float32")
    for relay in RELAY_MODES:
        check_same(sources, [layout] * 3, round_bytes=50_000, relay=relay)


def check_same(sources: list[RankLayout], layouts: list[RankLayout], *, round_bytes: int, relay: str) -> None:
    options = {"item_bytes": 4, "round_bytes": round_bytes, "relay": relay}
    plan, naive = build_plan(sources, layouts, **options), naive_plan(sources, layouts, **options)
    assert tuple(all_pieces(plan)) == naive.pieces
    assert message_sizes(plan) == naive.message_sizes
    assert (plan.num_rounds, plan.num_channels) == (naive.num_rounds, naive.num_channels)
    assert plan.cost_bytes == naive.cost_bytes
    for rank in range(len(sources)):
        assert pieces_from(plan, rank) == [p for p in naive.pieces if p.source == rank and p.relay is None]
    for rank in range(len(layouts)):
        assert pieces_to(plan, rank) == [p for p in naive.pieces if p.destination == rank]


def shards_of(layout: RankLayout, tensors: Arrays) -> Arrays:
    return {part.param: tensors[part.name][part.box.slices] for part in layout.slices}


def run_plan(
    plan: TransferPlan, sources: list[Arrays], destinations: list[dict[str, tuple[int, ...]]]
) -> tuple[list[Arrays], list[Arrays]]:
    """Moves every message, round by round; returns the destinations' parameters and write counts.

    Learners' messages are packed from their shards. A relayed message consists of what its sender received
    over the same channel one round earlier, learner after learner.
    """
    params = [{name: np.zeros(shape, np.float32) for name, shape in d.items()} for d in destinations]
    counts = [{name: np.zeros(shape, np.int64) for name, shape in d.items()} for d in destinations]
    messages: dict[MessageKey, np.ndarray] = {}
    sizes = message_sizes(plan)
    for p in all_pieces(plan):
        if p.relay is None:
            key = message_of(plan, p)
            message = messages.setdefault(key, np.zeros(sizes[key], np.float32))
            part = message[p.offset : p.offset + p.box.volume]
            assert not part.any(), "two pieces overlap in a message"
            part[:] = sources[p.source][p.source_param][p.source_box.slices].reshape(-1)
    arrived: dict[tuple[int, int, int], list[np.ndarray]] = {}
    for key in sorted(messages):
        arrived.setdefault((key.receiver, key.round, key.channel), []).append(messages[key])
    for key in sizes:
        if key.sender >= plan.num_sources:
            messages[key] = np.concatenate(arrived[key.sender, key.round - 1, key.channel])
    assert {key: len(message) for key, message in messages.items()} == sizes
    for p in all_pieces(plan):
        part = messages[message_of(plan, p)][p.offset : p.offset + p.box.volume]
        params[p.destination][p.destination_param][p.destination_box.slices] = part.reshape(p.box.shape)
        counts[p.destination][p.destination_param][p.destination_box.slices] += 1
    return params, counts


@settings(max_examples=30, deadline=None)
@given(
    case=dense_models(),
    num_learners=st.integers(1, 16),
    num_members=st.integers(1, 3),
    round_bytes=st.integers(12, 4096),
    relay=st.sampled_from(RELAY_MODES),
)
def test_every_needed_element_arrives_exactly_once(
    case: tuple[DenseModel, int], num_learners: int, num_members: int, round_bytes: int, relay: str
) -> None:
    """Directly or over a relay, in every mode of relaying."""
    model, size = case
    shapes, tensors = model.shapes(), full_tensors(model)
    sources = [
        fsdp_layout(shapes, rank=rank, world_size=num_learners, dtype="float32")
        for rank in range(num_learners)
    ]
    ranks = [tp_layout(model, rank, size) for _ in range(num_members) for rank in range(size)]
    layouts = [layout for layout, _ in ranks]
    plan = build_plan(sources, layouts, item_bytes=4, round_bytes=round_bytes, relay=relay)

    params, counts = run_plan(plan, [shards_of(s, tensors) for s in sources], [p for _, p in ranks])
    for (layout, _), own, count in zip(ranks, params, counts, strict=True):
        needed = {name: np.zeros(array.shape, np.int64) for name, array in count.items()}
        for part in layout.slices:
            needed[part.param][part.local_box.slices] = 1
            received = own[part.param][part.local_box.slices]
            assert received.tobytes() == np.ascontiguousarray(tensors[part.name][part.box.slices]).tobytes()
        for name in count:
            np.testing.assert_array_equal(count[name], needed[name])
    for key, n in message_sizes(plan).items():
        # A relayed message contains what came from all learners.
        assert 4 * n <= max(4, round_bytes) * (1 if key.sender < num_learners else num_learners)
    sent, relayed = sum(map(plan.sent_bytes, range(num_learners))), map(plan.relayed_bytes, range(len(ranks)))
    assert sent + sum(relayed) == sum(map(plan.received_bytes, range(len(ranks))))
    if relay == "always":
        # What several rollout ranks need leaves the learners once.
        distinct = {(part.name, part.box): part.box.volume for layout in layouts for part in layout.slices}
        assert sent == 4 * sum(distinct.values())
    elif relay == "never":
        assert relay_pairs(plan) == ()


def bytes_into_nodes(plan: TransferPlan, layouts: Sequence[RankLayout]) -> dict[str, int]:
    """What enters each node over the network; `layouts` are those of all ranks."""
    nodes = [layout.place.node for layout in layouts]
    entering: dict[str, int] = {}
    for key, elements in message_sizes(plan).items():
        if nodes[key.sender] != nodes[key.receiver]:
            node = nodes[key.receiver]
            entering[node] = entering.get(node, 0) + plan.item_bytes * elements
    return entering


@settings(max_examples=40, deadline=None)
@given(
    case=dense_models(),
    learner_nodes=st.lists(st.sampled_from("AB"), min_size=1, max_size=4),
    server_nodes=st.lists(st.sampled_from("XYZ"), min_size=1, max_size=4),
    round_bytes=st.integers(1000, 20_000),
    relay=st.sampled_from(RELAY_MODES),
)
def test_a_slice_enters_a_node_once_and_arrives_once(
    case: tuple[DenseModel, int],
    learner_nodes: list[str],
    server_nodes: list[str],
    round_bytes: int,
    relay: str,
) -> None:
    """Relaying stays within a node; no mode brings a node less than what it needs."""
    model, size = case
    shapes, tensors = model.shapes(), full_tensors(model)
    sources = [
        fsdp_layout(shapes, rank=rank, world_size=len(learner_nodes), dtype="float32").at(
            RankPlace(node=node)
        )
        for rank, node in enumerate(learner_nodes)
    ]
    ranks = [tp_layout(model, rank, size) for _ in server_nodes for rank in range(size)]
    places = [RankPlace(node=node) for node in server_nodes for _ in range(size)]
    layouts = [layout.at(place) for (layout, _), place in zip(ranks, places, strict=True)]
    plan = build_plan(sources, layouts, item_bytes=4, round_bytes=round_bytes, relay=relay)

    params, _ = run_plan(plan, [shards_of(s, tensors) for s in sources], [p for _, p in ranks])
    for layout, own in zip(layouts, params, strict=True):
        for part in layout.slices:
            wanted = np.ascontiguousarray(tensors[part.name][part.box.slices])
            assert own[part.param][part.local_box.slices].tobytes() == wanted.tobytes()
    entering = bytes_into_nodes(plan, [*sources, *layouts])
    for node in set(server_nodes):
        needed = {
            (part.name, part.box): part.box.volume
            for layout in layouts
            if layout.place.node == node
            for part in layout.slices
        }
        assert entering[node] >= 4 * sum(needed.values())
        if relay == "always":
            assert entering[node] == 4 * sum(needed.values())
    again = build_plan(sources, layouts, item_bytes=4, round_bytes=round_bytes, relay=relay)
    assert again.fingerprint == plan.fingerprint


@settings(max_examples=25, deadline=None)
@given(
    case=dense_models(),
    num_learners=st.integers(1, 4),
    num_members=st.integers(2, 4),
    round_bytes=st.integers(1000, 20_000),
)
def test_relaying_stays_within_staging_and_shares_the_work(
    case: tuple[DenseModel, int], num_learners: int, num_members: int, round_bytes: int
) -> None:
    model, size = case
    sources = [
        fsdp_layout(model.shapes(), rank=rank, world_size=num_learners, dtype="float32")
        for rank in range(num_learners)
    ]
    layouts = [tp_layout(model, rank, size)[0] for _ in range(num_members) for rank in range(size)]
    plan = build_plan(sources, layouts, item_bytes=4, round_bytes=round_bytes, relay="always")
    # From learners and relays together, no rank receives more in a round than the round's size, so that two
    # slots are enough. (A chunk has at least one element, hence the second term.)
    most = round_bytes + 4 * num_learners * plan.num_channels * len(layouts)
    for rank in range(len(layouts)):
        arriving = [0] * plan.num_rounds
        for key, elements in message_sizes(plan).items():
            arriving[key.round] += 4 * elements * (key.receiver == num_learners + rank)
        assert max(arriving) <= most
    # Everything is relayed in the round after the one in which it arrived.
    firsts = {(p.source, p.destination, p.name, p.box): p.round for p in all_pieces(plan) if p.relay is None}
    for p in all_pieces(plan):
        if p.relay is not None:
            assert firsts[p.source, p.relay, p.name, p.box] == p.round - 1
    again = build_plan(sources, layouts, item_bytes=4, round_bytes=round_bytes, relay="always")
    assert again.fingerprint == plan.fingerprint


@settings(max_examples=40, deadline=None)
@given(case=dense_models(), num_learners=st.integers(1, 6), replicas=st.integers(1, 3))
def test_replicas_share_the_sending(case: tuple[DenseModel, int], num_learners: int, replicas: int) -> None:
    """Among the holders of the same shard the loads differ by one tensor part at most, to all who need it."""
    model, size = case
    shards = [
        fsdp_layout(model.shapes(), rank=rank, world_size=num_learners, dtype="float32")
        for rank in range(num_learners)
    ]
    sources = [shards[index % num_learners] for index in range(num_learners * replicas)]
    ranks = [tp_layout(model, rank, size)[0] for rank in range(size)]
    plan = build_plan(sources, ranks, item_bytes=4, round_bytes=1 << 30)
    needed = sum(part.box.volume for layout in ranks for part in layout.slices)
    assert sum(piece.box.volume for piece in all_pieces(plan)) == needed
    parts: Counter[object] = Counter()
    for piece in all_pieces(plan):
        parts[piece.source, piece.name, piece.box] += 4 * piece.box.volume
    largest = max(parts.values())
    for shard in range(num_learners):
        loads = [plan.sent_bytes(shard + num_learners * replica) for replica in range(replicas)]
        assert max(loads) - min(loads) <= largest
    again = build_plan(sources, ranks, item_bytes=4, round_bytes=1 << 30)
    assert again.fingerprint == plan.fingerprint


@settings(max_examples=40, deadline=None)
@given(case=dense_models(), num_learners=st.integers(1, 16), data=st.data())
def test_digests_of_any_sharding_agree_and_a_changed_byte_is_found(
    case: tuple[DenseModel, int], num_learners: int, data: st.DataObject
) -> None:
    model, size = case
    tensors = full_tensors(model)
    shapes = model.shapes()
    ranks = [tp_layout(model, rank, size)[0] for rank in range(size)]
    learner = report_of_learners(shapes, ranks, tensors, num_learners)
    reports = [report_of_rank(layout, tensors, f"rollout rank {r}") for r, layout in enumerate(ranks)]

    assert disagreement(learner, reports) is None
    expected = sum(digest_array(n, t.shape, Box.full(t.shape), t) for n, t in tensors.items()) % 2**64
    assert model_digest([learner]) == model_digest(reports) == expected

    victim = data.draw(st.integers(0, size - 1))
    part = data.draw(st.sampled_from(ranks[victim].slices))
    damaged = {name: array.copy() for name, array in tensors.items()}
    index = tuple(
        data.draw(st.integers(low, high - 1)) for low, high in zip(part.box.start, part.box.stop, strict=True)
    )
    flip = np.int32(data.draw(st.integers(1, 2**31 - 1)))
    damaged[part.name].view(np.int32)[index] ^= flip
    reports[victim] = report_of_rank(ranks[victim], damaged, f"rollout rank {victim}")
    difference = disagreement(learner, reports)
    assert difference is not None
    assert difference.startswith(f"{part.name}: rollout rank {victim} holds")


def report_of_learners(
    shapes: dict[str, tuple[int, ...]], ranks: list[RankLayout], tensors: Arrays, num_learners: int
) -> DigestReport:
    """The atoms, each summed over the learner ranks' own rows."""
    totals = []
    layouts = [
        fsdp_layout(shapes, rank=r, world_size=num_learners, dtype="float32") for r in range(num_learners)
    ]
    for atom in digest_atoms(ranks):
        total = 0
        for layout in layouts:
            for part in layout.slices:
                common = part.box.intersect(atom.box) if part.name == atom.name else None
                if common is not None:
                    values = tensors[part.name][common.slices]
                    total += digest_array(part.name, part.global_shape, common, values)
        totals.append(
            SliceDigest(name=atom.name, global_shape=atom.global_shape, box=atom.box, value=total % 2**64)
        )
    return DigestReport.of(rank="learner", version=3, slices=tuple(totals))


def report_of_rank(layout: RankLayout, tensors: Arrays, rank: str) -> DigestReport:
    slices = tuple(
        SliceDigest(
            name=part.name,
            global_shape=part.global_shape,
            box=part.box,
            value=digest_array(part.name, part.global_shape, part.box, tensors[part.name][part.box.slices]),
        )
        for part in layout.slices
    )
    return DigestReport.of(rank=rank, version=3, slices=slices)


@st.composite
def boxes(draw: st.DrawFn, dims: int = 3) -> Box:
    starts = draw(st.lists(st.integers(0, 5), min_size=dims, max_size=dims))
    extents = draw(st.lists(st.integers(0, 5), min_size=dims, max_size=dims))
    return Box(tuple(starts), tuple(s + e for s, e in zip(starts, extents, strict=True)))


@given(a=boxes(), b=boxes())
def test_intersection_and_difference_partition_a_box(a: Box, b: Box) -> None:
    space = np.zeros((12, 12, 12), np.int64)
    common = a.intersect(b)
    for part in [*a.subtract(b), *([common] if common else [])]:
        space[part.slices] += 1
    expected = np.zeros_like(space)
    expected[a.slices] = 1
    np.testing.assert_array_equal(space, expected)
    assert common == b.intersect(a)
    assert a.contains(b) == (b.volume == 0 or common == b)


@given(case=dense_models())
def test_layouts_survive_the_wire(case: tuple[DenseModel, int]) -> None:
    model, size = case
    layout = tp_layout(model, size - 1, size)[0]
    assert RankLayout.from_bytes(layout.to_bytes()) == layout


def test_overlapping_sources_are_used_once() -> None:
    """Two learners whose rows overlap in part still send each row once."""
    shape = (10, 2)

    def rows(first: int, last: int) -> RankLayout:
        box = Box((first, 0), (last, 2))
        part = TensorSlice(name="w", global_shape=shape, box=box, param="w", offset=(0, 0))
        return RankLayout(dtype="float32", slices=(part,))

    plan = build_plan([rows(0, 7), rows(3, 10)], [rows(0, 10)], item_bytes=4, round_bytes=1 << 20)
    sent = np.zeros(shape, np.int64)
    for piece in all_pieces(plan):
        sent[piece.box.slices] += 1
    np.testing.assert_array_equal(sent, 1)
