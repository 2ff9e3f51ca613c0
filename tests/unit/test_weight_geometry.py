"""Boxes, chunks, covering, rounds and digests on cases small enough to write down; what readers refuse."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from paceline.core.errors import InvalidMessageError, WeightSyncError
from paceline.weights.digest.agreement import (
    DigestReport,
    SliceDigest,
    disagreement,
    format_digest,
    model_digest,
)
from paceline.weights.digest.definition import name_factor
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.cover import Need, assign_sources
from paceline.weights.geometry.layout import (
    RankLayout,
    RankPlace,
    TensorSlice,
    chunk_rows,
    expand_full,
)
from paceline.weights.plan.chunks import take_leading
from paceline.weights.plan.plan import RELAY_MODES, TransferPlan, build_plan
from support.plan_pieces import all_pieces, message_sizes, relay_pairs
from support.reference_digest import digest_array
from support.weight_layouts import fsdp_layout, full, rows


def test_chunks_are_torchs() -> None:
    assert [chunk_rows(10, rank, 4) for rank in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [chunk_rows(3, rank, 4) for rank in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 3)]


def test_column_slices_of_row_shards() -> None:
    """Two row shards to two column halves: four pieces, each a quarter."""
    sources = [fsdp_layout({"w": (4, 6)}, rank=r, world_size=2, dtype="float32") for r in range(2)]
    halves = [
        TensorSlice(name="w", global_shape=(4, 6), box=Box((0, c), (4, c + 3)), param="p", offset=(0, 0))
        for c in (0, 3)
    ]
    destinations = [RankLayout(dtype="float32", slices=(half,)) for half in halves]
    plan = build_plan(sources, destinations, item_bytes=2, round_bytes=1 << 20)
    moves = [(p.source, p.destination, p.source_box, p.destination_box) for p in all_pieces(plan)]
    assert moves == [
        (0, 0, Box((0, 0), (2, 3)), Box((0, 0), (2, 3))),
        (0, 1, Box((0, 3), (2, 6)), Box((0, 0), (2, 3))),
        (1, 0, Box((0, 0), (2, 3)), Box((2, 0), (4, 3))),
        (1, 1, Box((0, 3), (2, 6)), Box((2, 0), (4, 3))),
    ]
    assert plan.num_rounds == 1
    assert plan.sent_bytes(0) == plan.received_bytes(1) == 24


def test_rounds_are_filled_with_complete_rows() -> None:
    plan = build_plan([full("w", (7, 4))], [full("w", (7, 4))], item_bytes=4, round_bytes=4 * 10)
    assert [(p.round, p.offset, p.box.start[0], p.box.stop[0]) for p in all_pieces(plan)] == [
        (0, 0, 0, 2),
        (1, 0, 2, 4),
        (2, 0, 4, 6),
        (3, 0, 6, 7),
    ]


def test_a_row_larger_than_a_round_is_cut() -> None:
    fit, rest = take_leading(Box((0, 0), (2, 10)), 4, can_wait=False)
    assert fit == Box((0, 0), (1, 4))
    assert rest == [Box((0, 4), (1, 10)), Box((1, 0), (2, 10))]
    assert take_leading(Box((0, 0), (2, 10)), 4, can_wait=True) == (None, [Box((0, 0), (2, 10))])


def test_a_large_replicated_tensor_leaves_from_all_its_holders() -> None:
    needs = [Need(name="w", global_shape=(4096, 64), box=Box.full((4096, 64)), label="rollout rank 0")]
    covered = assign_sources([full("w", (4096, 64))] * 4, needs)
    supplies = [supply for source in range(4) for supply in covered.of_source(source)]
    assert sorted((s.source, s.box.volume) for s in supplies) == [(r, 65536) for r in range(4)]


def test_replicated_norms_leave_from_different_sources() -> None:
    shapes = {f"norm{i}": (16,) for i in range(8)}
    holder = expand_full(RankLayout(dtype="float32", slices=(), full_tensors=True), shapes)
    plan = build_plan([holder] * 4, [holder] * 2, item_bytes=4, round_bytes=1 << 20)
    assert [plan.sent_bytes(r) for r in range(4)] == [4 * 16 * 4] * 4
    assert {(p.source, p.destination) for p in all_pieces(plan)} == {
        (s, d) for s in range(4) for d in range(2)
    }


def test_missing_parts_unused_tensors_and_other_models_are_named() -> None:
    with pytest.raises(WeightSyncError, match=r"w: no learner holds \(2, 0\).*rollout rank 0 needs"):
        upper = fsdp_layout({"w": (4, 2)}, rank=0, world_size=2, dtype="float32")
        build_plan([upper], [full("w", (4, 2))], item_bytes=4, round_bytes=64)
    with pytest.raises(WeightSyncError, match="head: the learner holds it but no rollout rank takes it"):
        both = fsdp_layout({"w": (4, 2), "head": (1, 2)}, rank=0, world_size=1, dtype="float32")
        part = TensorSlice(name="w", global_shape=(4, 2), box=Box.full((4, 2)), param="w", offset=(0, 0))
        build_plan([both], [RankLayout(dtype="float32", slices=(part,))], item_bytes=4, round_bytes=64)
    with pytest.raises(
        WeightSyncError, match=r"w: rollout rank 0 gives shape \(4, 3\), the learner \(4, 2\)"
    ):
        build_plan([full("w", (4, 2))], [full("w", (4, 3))], item_bytes=4, round_bytes=64)
    with pytest.raises(WeightSyncError, match="would both land in p"):
        twice = tuple(
            TensorSlice(name=n, global_shape=(2,), box=Box((0,), (2,)), param="p", offset=(o,))
            for n, o in (("a", 0), ("b", 1))
        )
        source = fsdp_layout({"a": (2,), "b": (2,)}, rank=0, world_size=1, dtype="float32")
        build_plan([source], [RankLayout(dtype="float32", slices=twice)], item_bytes=4, round_bytes=64)
    with pytest.raises(WeightSyncError, match="round_bytes is 1"):
        build_plan([full("w", (4, 2))], [full("w", (4, 2))], item_bytes=4, round_bytes=1)


def test_the_digest_is_the_documented_sum() -> None:
    """Against the definition in plain Python integers."""

    def splitmix(seed: int, index: int) -> int:
        x = (seed + index) * 0x9E3779B97F4A7C15 % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return (x ^ x >> 31) | 1

    values = np.array([[[1.5, -2.0], [0.25, 3.0]]], np.float32)
    box = Box((2, 1, 0), (3, 3, 2))  # of a tensor of shape (4, 3, 2)
    expected = 0
    for row, col, depth in np.ndindex(values.shape):
        bits = int(values.view(np.int32)[row, col, depth])
        column = (col + 1) * 2 + depth
        expected += splitmix(0x506163656C696E65, row + 2) * splitmix(0x7765696768747321, column) * bits
    expected = expected * name_factor("layer.w") % 2**64
    assert digest_array("layer.w", (4, 3, 2), box, values) == expected


def test_a_report_that_misses_elements_or_differs_in_version_is_no_agreement() -> None:
    def report(rank: str, version: int, stop: int, value: int) -> DigestReport:
        part = SliceDigest(name="w", global_shape=(4,), box=Box((0,), (stop,)), value=value)
        return DigestReport.of(rank=rank, version=version, slices=(part,))

    received = [report("rollout rank 0", 1, 4, 7), report("rollout rank 1", 1, 4, 7)]
    assert disagreement(report("learner", 1, 4, 7), received) is None
    assert disagreement(report("learner", 2, 4, 7), received) == (
        "rollout rank 0 received version 1, the learner sent 2"
    )
    assert disagreement(report("learner", 1, 3, 7), received) == (
        "w: the learner reported no digest for all of (0,)..(4,), which rollout rank 0 holds"
    )
    assert disagreement(report("learner", 1, 4, 7), [*received[:1], report("rollout rank 1", 1, 4, 8)]) == (
        "w: rollout rank 1 holds (0,)..(4,) with digest 0000000000000008, the learner sent 0000000000000007 "
        "(version 1); the server must not serve it"
    )
    assert disagreement(report("learner", 1, 4, 7), []) == "the server reported no digests of version 1"
    with pytest.raises(WeightSyncError, match="w: 1 elements are on no rank"):
        model_digest([report("learner", 1, 3, 7)])
    with pytest.raises(WeightSyncError, match="w: rollout rank 1 and another rank hold different values"):
        model_digest([report("rollout rank 0", 1, 4, 7), report("rollout rank 1", 1, 4, 8)])
    assert format_digest(model_digest([report("a", 1, 4, 0xAB)])) == "00000000000000ab"
    sent = report("learner", 1, 4, 2**64 - 1)
    back = DigestReport.from_bytes(sent.to_bytes())
    assert (back.rank, back.version, back.slices) == ("learner", 1, sent.slices)
    assert sent.slices[0].value == 2**64 - 1
    with pytest.raises(InvalidMessageError, match="1 slices have 2 digests"):
        DigestReport.from_bytes(dataclasses.replace(sent, values=np.zeros(2, np.uint64)).to_bytes())


@pytest.mark.parametrize(
    ("learners", "engines", "size"), [(1, 1, 1), (2, 1, 2), (2, 2, 1), (3, 2, 2), (4, 1, 4)]
)
def test_every_round_moves_as_much_and_no_rank_stages_more_than_one(
    learners: int, engines: int, size: int
) -> None:
    """Rows of one matrix, columns of another: what a learner has for each rollout rank differs in volume."""
    shapes = {"up": (2400, 64), "down": (64, 2400)}
    sources = [
        fsdp_layout(shapes, rank=rank, world_size=learners, dtype="float32") for rank in range(learners)
    ]

    def need(rank: int) -> RankLayout:
        first, last = rank * 2400 // size, (rank + 1) * 2400 // size
        boxes = {"up": Box((first, 0), (last, 64)), "down": Box((0, first), (64, last))}
        slices = (
            TensorSlice(name=name, global_shape=shapes[name], box=box, param=name, offset=(0, 0))
            for name, box in boxes.items()
        )
        return RankLayout(dtype="float32", slices=tuple(slices))

    destinations = [need(rank) for _ in range(engines) for rank in range(size)]
    round_bytes = 128 << 10
    plan = build_plan(sources, destinations, item_bytes=4, round_bytes=round_bytes)
    arriving = {rank: [0] * plan.num_rounds for rank in range(len(destinations))}
    packed: dict[int, list[set[tuple[str, Box]]]] = {
        rank: [set() for _ in range(plan.num_rounds)] for rank in range(learners)
    }
    for piece in all_pieces(plan):
        arriving[piece.destination][piece.round] += 4 * piece.box.volume
        packed[piece.source][piece.round].add((piece.name, piece.box))
    packing = [[4 * sum(box.volume for _, box in boxes) for boxes in rounds] for rounds in packed.values()]
    for rounds in (*arriving.values(), *packing):
        assert max(rounds) <= round_bytes
        assert min(rounds[:-1]) >= 0.7 * max(rounds)


@pytest.mark.parametrize(
    ("learners", "engines", "parallel", "relayed"),
    [
        (1, 1, 1, False),
        (1, 2, 1, True),
        (1, 3, 1, True),
        (2, 2, 1, False),
        (2, 3, 1, True),
        (2, 6, 1, True),
        (1, 1, 4, False),
        (4, 1, 4, False),
        (4, 2, 2, False),
        (4, 4, 1, False),
        (2, 2, 2, True),
    ],
)
def test_relaying_is_chosen_where_the_learners_links_bind(
    learners: int, engines: int, parallel: int, relayed: bool
) -> None:
    """Each byte then leaves the learners once per set of equal ranks, so the busiest link carries less."""
    size = 960
    sources = [rows(size, rank, learners) for rank in range(learners)]
    layouts = [rows(size, rank, parallel) for _ in range(engines) for rank in range(parallel)]

    def plan(relay: str) -> TransferPlan:
        return build_plan(sources, layouts, item_bytes=4, round_bytes=32 << 20, relay=relay)

    auto, never, always = plan("auto"), plan("never"), plan("always")
    assert auto.fingerprint == (always if relayed else never).fingerprint
    assert auto.cost_bytes <= never.cost_bytes
    if engines > 1:
        assert sum(map(always.sent_bytes, range(learners))) == size << 20
        passed = [always.relayed_bytes(rank) for rank in range(len(layouts))]
        assert sum(passed) == (engines - 1) * size << 20
        assert max(passed) - min(passed) <= always.num_sources * (engines - 1) * (2 << 20)


@pytest.mark.parametrize(
    ("learners", "engines", "parallel"), [(1, 2, 1), (2, 2, 1), (4, 4, 2), (2, 4, 1), (8, 2, 4)]
)
def test_between_two_learner_nodes_and_two_rollout_nodes_a_slice_crosses_the_network_once_per_node(
    learners: int, engines: int, parallel: int
) -> None:
    """There are `engines` on each rollout node, and as many `learners` on each of theirs."""
    size = 960

    def plan(relay: str, *, nodes_known: bool = True) -> tuple[TransferPlan, int]:
        """A plan, and what enters the two rollout nodes."""

        def at(layout: RankLayout, node: str) -> RankLayout:
            return layout.at(RankPlace(node=node)) if nodes_known else layout

        sources = [at(rows(size, r, 2 * learners), f"L{r // learners}") for r in range(2 * learners)]
        layouts = [
            at(rows(size, rank, parallel), node)
            for node in ("R0", "R1")
            for _ in range(engines)
            for rank in range(parallel)
        ]
        made = build_plan(sources, layouts, item_bytes=4, round_bytes=32 << 20, relay=relay)
        first, per_node = len(sources), engines * parallel
        nodes = [-1] * first + [0] * per_node + [1] * per_node
        crossing = sum(
            4 * elements
            for key, elements in message_sizes(made).items()
            if nodes[key.sender] != nodes[key.receiver]
        )
        return made, crossing

    auto, crossing = plan("auto")
    assert crossing == 2 * size << 20
    direct, crossing_directly = plan("never")
    assert crossing_directly == 2 * engines * size << 20
    assert auto.cost_bytes < direct.cost_bytes
    # Where nothing is known of nodes, all is as within one.
    assert plan("auto", nodes_known=False)[1] >= crossing


@pytest.mark.parametrize("relay", RELAY_MODES)
def test_a_copy_of_the_weights_on_a_node_serves_its_engines(relay: str) -> None:
    """Two nodes with two shards each; a third node has an engine and no copy, so all four ranks serve it."""
    here, there, elsewhere = (RankPlace(node=node) for node in "ABC")
    shards = [rows(960, rank, 2) for rank in range(2)]
    sources = [shard.at(place) for place in (here, there) for shard in shards]
    layouts = [rows(960, 0, 1).at(place) for place in (here, there, elsewhere)]
    plan = build_plan(sources, layouts, item_bytes=4, round_bytes=32 << 20, relay=relay)
    sent: dict[tuple[int, int], int] = {}
    for piece in all_pieces(plan):
        if piece.relay is None:
            key = (piece.source, piece.destination)
            sent[key] = sent.get(key, 0) + piece.box.volume
    volume = layouts[0].slices[0].box.volume
    half, quarter = volume // 2, volume // 4
    assert sent == {
        **{(rank, rank // 2): half for rank in range(4)},
        **{(rank, 2): quarter for rank in range(4)},
    }


def test_ranks_on_one_node_are_planned_for_as_if_nothing_were_known_of_nodes() -> None:
    sources, layouts = [rows(960, 0, 1)], [rows(960, 0, 1)] * 3
    here = RankPlace(node="N", gpu="G")
    for relay in RELAY_MODES:
        options = {"item_bytes": 4, "round_bytes": 32 << 20, "relay": relay}
        placed = build_plan([s.at(here) for s in sources], [x.at(here) for x in layouts], **options)
        plain = build_plan(sources, layouts, **options)
        assert placed.fingerprint == plain.fingerprint
        assert placed.cost_bytes == plain.cost_bytes


def test_what_little_a_set_shares_is_sent_directly() -> None:
    """Two engines of size 2 share halves; the vector that all four ranks need gets no messages of its own."""
    vector = TensorSlice(name="norm", global_shape=(64,), box=Box((0,), (64,)), param="norm", offset=(0,))

    def with_vector(layout: RankLayout) -> RankLayout:
        return RankLayout(dtype="float32", slices=(*layout.slices, vector))

    layouts = [with_vector(rows(960, rank, 2)) for _ in range(2) for rank in range(2)]
    plan = build_plan(
        [with_vector(rows(960, 0, 1))], layouts, item_bytes=4, round_bytes=32 << 20, relay="auto"
    )
    assert relay_pairs(plan) == ((1, 3), (2, 4), (3, 1), (4, 2))
    assert [p.relay for p in all_pieces(plan) if p.name == "norm"] == [None] * 4
    always = build_plan(
        [with_vector(rows(960, 0, 1))], layouts, item_bytes=4, round_bytes=32 << 20, relay="always"
    )
    assert any(p.relay is not None for p in all_pieces(always) if p.name == "norm")


def test_a_box_is_moved_in_all_dimensions_or_not_at_all() -> None:
    assert Box((1, 2), (3, 4)).translate((1, -2)) == Box((2, 0), (4, 2))
    with pytest.raises(ValueError, match="2 dimensions cannot be moved by 1"):
        Box((1, 2), (3, 4)).translate((1,))


@pytest.mark.parametrize(("start", "stop"), [((-1, 0), (2, 2)), ((0, 3), (2, 2)), ((0,), (2, 2))])
def test_a_box_that_cannot_be_is_refused(start: tuple[int, ...], stop: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="box: "):
        Box(start, stop)


def test_ranks_that_keep_one_box_in_different_places_each_get_it_in_their_own() -> None:
    source = full("w", (4,))
    (part,) = source.slices
    places = [RankLayout(dtype="float32", slices=(dataclasses.replace(part, param=name),)) for name in "ab"]
    plan = build_plan([source], places, item_bytes=4, round_bytes=1 << 18)
    assert {(piece.destination, piece.destination_param) for piece in all_pieces(plan)} == {
        (0, "a"),
        (1, "b"),
    }
