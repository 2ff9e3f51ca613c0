"""Boxes, chunks, covering, rounds and digests on cases small enough to write down; what readers refuse."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import msgpack
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
from paceline.weights.geometry import cover
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.cover import Need, assign_sources
from paceline.weights.geometry.layout import (
    RankLayout,
    RankPlace,
    TensorSlice,
    chunk_rows,
    expand_full,
    same_slices,
)
from paceline.weights.geometry.sharding import Sharding
from paceline.weights.plan import flows
from paceline.weights.plan import plan as plan_module
from paceline.weights.plan.flows import take_leading
from paceline.weights.plan.plan import RELAY_MODES, TransferPlan, build_plan
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.transport.staging import lay_out
from support.plan_pieces import all_pieces, message_sizes, pieces_from, pieces_to, relay_pairs
from support.reference_digest import digest_array
from support.weight_layouts import DenseModel, fsdp_layout, tp_layout


def full(name: str, shape: tuple[int, ...]) -> RankLayout:
    return expand_full(RankLayout(dtype="float32", slices=(), full_tensors=True), {name: shape})


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


def make_spec(**changes: object) -> WeightGroupSpec:
    fields = {
        "epoch": 3,
        "backend": "gloo",
        "store_host": "127.0.0.1",
        "store_port": 4711,
        "learner_layouts": (full("w", (4, 2)),),
        "rollout_layouts": (full("w", (4, 2)), RankLayout(dtype="float32", slices=(), full_tensors=True)),
        "wire_dtype": "float32",
        "timeout_s": 5,
    }
    return WeightGroupSpec(**{**fields, **changes})


def test_the_group_spec_survives_the_wire() -> None:
    spec = make_spec()
    assert WeightGroupSpec.from_bytes(spec.to_bytes()) == spec
    assert [str(spec.rank_ref(r)) for r in range(spec.world_size)] == [
        "learner rank 0",
        "rollout rank 0",
        "rollout rank 1",
    ]
    assert [len(layout.slices) for layout in spec.expanded_rollout_layouts()] == [1, 1]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("backend", "mpi", "none of gloo, nccl"),
        ("wire_dtype", "int8", "none of float32"),
        ("wire_dtype", "bfloat16", "keeps float32 parameters"),
        ("store_port", 0, "must be positive"),
        ("rollout_layouts", (), "at least one"),
    ],
)
def test_a_spec_that_cannot_work_is_refused(field: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_spec(**{field: value})


@pytest.mark.parametrize(
    "damage",
    [
        lambda plain: plain.update(schema=1),
        lambda plain: plain.update(dtype="int4"),
        lambda plain: plain.update(slices=None),
        lambda plain: plain["slices"][0].pop(),
        lambda plain: plain["slices"][0].__setitem__(0, ""),
        lambda plain: plain["slices"][0].__setitem__(2, 1),
        lambda plain: plain["slices"][0].__setitem__(2, -1),
        lambda plain: plain["boxes"][0].__setitem__(2, [5, 2]),
        lambda plain: plain["boxes"][0].__setitem__(1, [-1, 0]),
        lambda plain: plain["boxes"][0].__setitem__(0, [4.0, 2]),
        lambda plain: plain["boxes"][0].__setitem__(3, [0]),
        lambda plain: plain["boxes"][0].pop(),
    ],
)
def test_a_damaged_layout_is_a_typed_rejection(damage: object) -> None:
    plain = full("w", (4, 2)).to_dict()
    assert RankLayout.from_dict(msgpack.unpackb(msgpack.packb(plain))) == full("w", (4, 2))
    damage(plain)
    with pytest.raises(InvalidMessageError) as caught:
        RankLayout.from_dict(plain)
    assert caught.value.reason == "bad_layout"


def test_bytes_that_are_no_message_are_rejected() -> None:
    for read in (
        RankLayout.from_bytes,
        Sharding.from_bytes,
        WeightGroupSpec.from_bytes,
        DigestReport.from_bytes,
    ):
        for data in (b"", b"\xc1", msgpack.packb(7), msgpack.packb({"schema": 1})):
            with pytest.raises(InvalidMessageError):
                read(data)


def test_plans_differ_where_the_rounds_do() -> None:
    layouts = [full("w", (7, 4))]
    plans = [build_plan(layouts, layouts, item_bytes=4, round_bytes=size) for size in (40, 44, 64)]
    assert plans[0].fingerprint == plans[1].fingerprint != plans[2].fingerprint
    assert dataclasses.replace(plans[0]).fingerprint == plans[0].fingerprint


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


MIB = 1 << 18  # elements of float32


def rows(count: int, rank: int, size: int) -> RankLayout:
    """One of `size` equal parts of a matrix with `count` MiB."""
    share = count // size
    box = Box((rank * share, 0), ((rank + 1) * share, MIB))
    part = TensorSlice(name="w", global_shape=(count, MIB), box=box, param="w", offset=(0, 0))
    return RankLayout(dtype="float32", slices=(part,))


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


def test_a_place_travels_with_the_layout_and_in_the_spec() -> None:
    shared = full("w", (4, 2))
    places = [RankPlace(node="n1", gpu="GPU-1"), RankPlace(node="n2"), RankPlace()]
    layouts = tuple(shared.at(place) for place in places)
    read = [RankLayout.from_bytes(layout.to_bytes()) for layout in layouts]
    assert read == list(layouts)
    assert read[0].slices is read[1].slices
    spec = WeightGroupSpec(
        epoch=1,
        backend="gloo",
        store_host="h",
        store_port=1,
        learner_layouts=layouts[:1],
        rollout_layouts=layouts[1:],
        wire_dtype="float32",
    )
    assert WeightGroupSpec.from_bytes(spec.to_bytes()) == spec
    for fields in (["n"], ["n", "g", 7], ["n", 1, b""]):
        with pytest.raises(InvalidMessageError, match="node, GPU and slices"):
            RankLayout.from_bytes(msgpack.packb(fields))


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


def model_of(layers: int) -> DenseModel:
    return DenseModel(
        vocab_size=512,
        hidden=64,
        heads=8,
        kv_heads=4,
        head_dim=8,
        intermediate=128,
        layers=layers,
        tied=False,
        bias=True,
    )


@dataclasses.dataclass(kw_only=True)
class Work:
    """How often needed boxes are cut among the sources, flows into messages, and boxes at their ends."""

    regions: int = 0
    flows: int = 0
    boxes: int = 0
    overlapping: int = 0

    def count(self, patch: pytest.MonkeyPatch, module: ModuleType, name: str, field: str) -> None:
        """Counts the calls of a function."""
        act = getattr(module, name)

        def counted(*args: object, **options: object) -> object:
            setattr(self, field, getattr(self, field) + 1)
            return act(*args, **options)

        patch.setattr(module, name, counted)


def planned(
    layers: int, servers: int, monkeypatch: pytest.MonkeyPatch, *, relay: str = "never", replicas: int = 1
) -> tuple[Work, Work, TransferPlan]:
    """What planning takes, and what a learner and a rollout rank need for their own pieces; and the plan."""
    work = Work(), Work()
    model = model_of(layers)
    sources = [
        fsdp_layout(model.shapes(), rank=r, world_size=8, dtype="float32") for r in range(8)
    ] * replicas
    layouts = [tp_layout(model, rank, 4)[0] for rank in range(4)] * servers
    for part in work:
        with monkeypatch.context() as patch:
            part.count(patch, cover, "_regions_of", "regions")
            part.count(patch, cover, "_cut_overlapping", "overlapping")
            part.count(patch, plan_module, "cut_flow", "flows")
            part.count(patch, flows, "take_leading", "boxes")
            if part is work[0]:
                plan = build_plan(sources, layouts, item_bytes=4, round_bytes=1 << 18, relay=relay)
                assert len(plan.fingerprint) == 32
            else:
                assert pieces_from(plan, 0)
                assert pieces_to(plan, 0)
    return *work, plan


@pytest.mark.parametrize("replicas", [1, 2])
def test_planning_cuts_one_layer_however_many_there_are(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each distinct box is cut among the learners once, and no flow: those of others are known by size."""
    small, _, _ = planned(2, 1, monkeypatch, replicas=replicas)
    for relay in RELAY_MODES:
        large, own, _ = planned(40, 4, monkeypatch, relay=relay, replicas=replicas)
        assert large.regions == small.regions > 0
        assert large.flows == large.overlapping == 0
        assert own.regions == 0


def test_a_rank_cuts_its_own_flows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its 4 kinds of receivers and of its 8 learners, one of them the same, however many servers."""
    for servers in (1, 4):
        _, own, plan = planned(40, servers, monkeypatch)
        assert len(plan.flows.flows) == 8 * 4 * servers
        assert own.flows == 4 + 8 - 1
        # A message ends in at most three calls per flow and round.
        assert 0 < own.boxes <= 3 * plan.num_rounds * own.flows


def test_many_learners_together_send_a_rank_no_more_than_a_round() -> None:
    """However small each flow's share: 32 learners, rows of 8 bytes, one kibibyte per round."""
    sources = [fsdp_layout({"w": (4096, 2)}, rank=r, world_size=32, dtype="float32") for r in range(32)]
    plan = build_plan(sources, [full("w", (4096, 2))], item_bytes=4, round_bytes=1 << 10)
    arriving = Counter[int]()
    for key, elements in message_sizes(plan).items():
        arriving[key.round] += 4 * elements
    assert max(arriving.values()) <= 1 << 10


def test_a_learner_packs_once_for_servers_that_are_alike() -> None:
    layouts = [rows(960, rank, 2) for rank in range(2)]
    sizes = [
        lay_out(build_plan([rows(960, 0, 1)], layouts * servers, item_bytes=4, round_bytes=1 << 20), 1, 0)
        for servers in (1, 5)
    ]
    assert sizes[0].slot_sizes == sizes[1].slot_sizes
    assert sizes[0].pieces == sizes[1].pieces
    assert [len(sends) for sends in sizes[1].sends] == [5 * len(sends) for sends in sizes[0].sends]


def test_a_layout_is_the_known_one_whatever_the_order_of_its_slices() -> None:
    layout = fsdp_layout({"a": (4, 2), "b": (4,)}, rank=0, world_size=2, dtype="float32")
    assert same_slices(layout, dataclasses.replace(layout, slices=layout.slices[::-1]))
    for change in ({"slices": layout.slices[:1]}, {"dtype": "float16"}, {"place": RankPlace(node="other")}):
        assert not same_slices(layout, dataclasses.replace(layout, **change))


def test_a_sharding_gives_every_rank_its_layout() -> None:
    shapes = model_of(3).shapes() | {"small": (3, 2)}
    places = [RankPlace(node="n1", gpu=f"GPU-{rank}") for rank in range(5)]
    layouts = [
        fsdp_layout(shapes, rank=rank, world_size=5, dtype="bfloat16").at(place)
        for rank, place in enumerate(places)
    ]
    renamed = dataclasses.replace(layouts[4].slices[0], param="own.name")
    layouts[4] = dataclasses.replace(layouts[4], slices=(renamed, *layouts[4].slices[1:]))
    sharding = Sharding.of(layouts)
    read = Sharding.from_bytes(sharding.to_bytes())
    assert read == sharding
    for some in (sharding, read):
        assert list(some) == layouts
        assert some.places == tuple(places)
        assert some.shapes == shapes
    # Layers are alike: three of them add nothing to two.
    assert len(sharding.kinds) == len(Sharding.of(list(layouts_of(2, 5))).kinds) + 2
    with pytest.raises(ValueError, match=r"one dtype, got \['bfloat16', 'float32'\]"):
        Sharding.of([layouts[0], *layouts_of(1, 1)])
    with pytest.raises(ValueError, match=r"w: rank 1 gives shape \(4, 3\), another rank \(4, 2\)"):
        Sharding.of([full("w", (4, 2)), full("w", (4, 3))])


def layouts_of(layers: int, world_size: int) -> Iterator[RankLayout]:
    for rank in range(world_size):
        yield fsdp_layout(model_of(layers).shapes(), rank=rank, world_size=world_size, dtype="float32")


@pytest.mark.parametrize(
    "damage",
    [
        lambda plain: plain.update(schema=0),
        lambda plain: plain.update(dtype="int4"),
        lambda plain: plain.update(tensors=None),
        lambda plain: plain["tensors"][0].__setitem__(0, ""),
        lambda plain: plain["tensors"][0].__setitem__(1, 1),
        lambda plain: plain["tensors"][0].__setitem__(1, -1),
        lambda plain: plain["kinds"][0].pop(),
        lambda plain: plain["kinds"][0].__setitem__(0, [4, 1]),
        lambda plain: plain["kinds"][0][1][0].__setitem__(0, 1),
        lambda plain: plain["kinds"][0][1][0].__setitem__(0, -1),
        lambda plain: plain["kinds"][0][1][0].__setitem__(2, [4]),
        lambda plain: plain["kinds"][0][1][0].__setitem__(4, 7),
        lambda plain: plain["kinds"][0][1][0].pop(),
    ],
)
def test_a_damaged_sharding_is_a_typed_rejection(damage: Callable[[Any], None]) -> None:
    places, slices = msgpack.unpackb(Sharding.of([full("w", (4, 2))]).to_bytes())
    plain = msgpack.unpackb(slices)
    damage(plain)
    with pytest.raises(InvalidMessageError) as caught:
        Sharding.from_bytes(msgpack.packb([places, msgpack.packb(plain)]))
    assert caught.value.reason == "bad_layout"


def test_a_spec_has_the_layouts_that_servers_share_once() -> None:
    source, ranks = full("w", (512, 8)), [full(f"w{n}", (512, 8)) for n in range(3)]
    sizes = []
    for servers in (1, 200):
        spec = WeightGroupSpec(
            epoch=1,
            backend="nccl",
            store_host="h",
            store_port=1,
            learner_layouts=(source,),
            # Not the same objects: as they come from different servers.
            rollout_layouts=tuple(
                RankLayout.from_dict(rank.to_dict()) for _ in range(servers) for rank in ranks
            ),
            wire_dtype="float32",
        )
        packed = spec.to_bytes()
        sizes.append(len(packed))
        read = WeightGroupSpec.from_bytes(packed)
        assert read == spec
        assert len({id(layout) for layout in read.rollout_layouts}) == 3
    assert sizes[1] < sizes[0] + 200


@pytest.mark.parametrize("cut", [0, 1, 10, -1])
def test_a_spec_that_is_cut_off_is_refused(cut: int) -> None:
    spec = WeightGroupSpec(
        epoch=1,
        backend="nccl",
        store_host="h",
        store_port=1,
        learner_layouts=(full("w", (4,)),),
        rollout_layouts=(full("w", (4,)),),
        wire_dtype="float32",
    )
    with pytest.raises(InvalidMessageError, match="weight group spec"):
        WeightGroupSpec.from_bytes(spec.to_bytes()[:cut])
