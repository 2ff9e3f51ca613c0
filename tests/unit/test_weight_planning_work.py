"""How much planning a push takes: what is alike is cut once, and a rank cuts its own part alone."""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from types import ModuleType

import numpy as np
import pytest

from paceline.core.errors import WeightSyncError
from paceline.weights.geometry import cover
from paceline.weights.plan import chunks
from paceline.weights.plan import plan as plan_module
from paceline.weights.plan.plan import RELAY_MODES, TransferPlan, build_plan
from paceline.weights.transport.staging import lay_out
from support.plan_pieces import message_sizes, pieces_from, pieces_to
from support.weight_layouts import fsdp_layout, full, model_of, rows, tp_layout


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
            part.count(patch, cover, "_region_of", "regions")
            part.count(patch, cover, "_cut_overlapping", "overlapping")
            part.count(patch, plan_module, "cut_into_chunks", "flows")
            part.count(patch, chunks, "take_leading", "boxes")
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


def test_a_rank_cuts_flows_of_the_same_shapes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its 11 flows have two sequences of shapes, however many layers and servers there are."""
    for layers, servers in ((40, 1), (40, 4), (80, 4)):
        _, own, plan = planned(layers, servers, monkeypatch)
        assert len(plan.flows.flows) == 8 * 4 * servers
        assert own.flows == 2
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
    single, five = (
        lay_out(build_plan([rows(960, 0, 1)], layouts * servers, item_bytes=4, round_bytes=1 << 20), 1, 0)
        for servers in (1, 5)
    )
    assert single.slot_sizes == five.slot_sizes
    assert len(single.at) > 0
    assert single.places.names == five.places.names
    for column in ("name", "start", "shape"):
        np.testing.assert_array_equal(getattr(single.places, column), getattr(five.places, column))
    np.testing.assert_array_equal(single.at, five.at)
    np.testing.assert_array_equal(single.bounds, five.bounds)
    assert [len(sends) for sends in five.sends] == [5 * len(sends) for sends in single.sends]


def test_added_rounds_have_no_pieces() -> None:
    layout = lay_out(
        build_plan([rows(960, 0, 1)], [rows(960, 0, 1)], item_bytes=4, round_bytes=1 << 20), 1, 1
    )
    longer = layout.padded(layout.num_rounds + 2)
    assert longer.num_rounds == len(longer.receives) == layout.num_rounds + 2
    counts = [len(longer.at[longer.pieces(number)]) for number in range(longer.num_rounds)]
    assert counts[-2:] == [0, 0]
    assert sum(counts) == len(layout.at)
    assert min(counts[:-2]) > 0


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_while_a_plan_is_computed(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go through all objects of the plan again and again; afterwards it is as it was before."""
    seen = []

    def look_in(name: str) -> None:
        act = getattr(plan_module, name)

        def looking(*args: object, **options: object) -> object:
            seen.append((name, gc.isenabled()))
            return act(*args, **options)

        monkeypatch.setattr(plan_module, name, looking)

    look_in("chunk_sizes")
    look_in("cut_into_chunks")
    model = model_of(1)
    source = fsdp_layout(model.shapes(), rank=0, world_size=1, dtype="float32")
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        plan = build_plan([source], [tp_layout(model, 0, 1)[0]], item_bytes=4, round_bytes=1 << 18)
        assert gc.isenabled() is enabled
        with pytest.raises(WeightSyncError):
            build_plan([source], [tp_layout(model, 0, 1)[0]], item_bytes=4, round_bytes=1)
        assert gc.isenabled() is enabled
        lay_out(plan, 1, 0)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert set(seen) == {("chunk_sizes", False), ("cut_into_chunks", False)}
