"""The learner gives cached memory back where an engine on its GPU lacks it, and only there."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator

import pytest
import torch

from paceline.core.members import EnginePart
from paceline.engines.memory import MARGIN, MEASURED_MARGIN, EngineMemory
from paceline.learner.distributed import engine_memory
from paceline.learner.distributed.engine_memory import (
    GpuMemory,
    ReleasedMemory,
    release_if_short,
    release_memory,
)
from paceline.learner.distributed.ranks import Ranks
from paceline.models.model_shape import ModelShape
from support.cli_configs import config
from support.learner_ranks import alone

GIB = 1 << 30
WEIGHTS, CACHE = EnginePart.WEIGHTS, EnginePart.KV_CACHE
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with alone() as group:
        yield group


def needed(parts: Collection[EnginePart]) -> int:
    """Of an engine with weights of 10 GiB and a KV cache of 20."""
    return 10 * GIB * (WEIGHTS in parts) + 20 * GIB * (CACHE in parts) + MARGIN


class Gpu(GpuMemory):
    """A GPU of 100 GiB of which torch's allocator caches 40."""

    def __init__(self, free: int, of_others: int = 0) -> None:
        self._now, self._of_others, self.gave_back = free, of_others, 0

    @property
    def total(self) -> int:
        return 100 * GIB

    @property
    def free(self) -> int:
        return self._now

    @property
    def of_others(self) -> int:
        return self._of_others

    def give_back(self) -> int:
        self._now, self.gave_back = self._now + 40 * GIB, self.gave_back + 1
        return 40 * GIB


@pytest.mark.parametrize(
    ("parts", "free", "freed", "has_room"),
    [
        ((WEIGHTS,), 10 * GIB + MARGIN - 1, 40, True),
        ((WEIGHTS,), 10 * GIB + MARGIN, 0, False),
        ((WEIGHTS,), 30 * GIB + MARGIN, 0, True),
        ((CACHE,), 20 * GIB + MARGIN - 1, 40, True),
        ((WEIGHTS, CACHE), 30 * GIB + MARGIN - 1, 40, True),
        ((), 90 * GIB, 40, True),
    ],
)
def test_memory_is_given_back_where_it_lacks(
    ranks: Ranks, parts: tuple[EnginePart, ...], free: int, freed: int, has_room: bool
) -> None:
    gpu = Gpu(free)
    made = release_memory(parts, needed, gpu, ranks)
    assert made == ReleasedMemory(freed_bytes=freed * GIB, has_room=has_room)
    assert gpu.gave_back == (freed > 0)


@pytest.mark.parametrize("others", [(True, False), (False, True), (False, False), (True, True)])
def test_an_engine_has_room_where_all_ranks_have_it(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, others: tuple[bool, bool]
) -> None:
    """An engine over two GPUs wakes on both."""

    def gather(own: bytes, _: Ranks) -> list[bytes]:
        return [own, *(json.dumps([5, has_room]).encode() for has_room in others)]

    monkeypatch.setattr(engine_memory, "gather_bytes", gather)
    for free, own in ((90 * GIB, True), (10 * GIB + MARGIN, False)):
        made = release_memory((WEIGHTS,), needed, Gpu(free), ranks)
        assert made == ReleasedMemory(freed_bytes=10, has_room=own and others == (True, True))


def test_what_an_engine_takes_meanwhile_does_not_count(ranks: Ranks) -> None:
    class Shared(Gpu):
        def give_back(self) -> int:
            freed = super().give_back()
            self._now -= 50 * GIB
            return freed

    gpu = Shared(60 * GIB)
    assert release_memory((), lambda parts: 100 * GIB, gpu, ranks).freed_bytes == 40 * GIB


@pytest.mark.parametrize(
    ("free", "of_others", "gives_back"),
    [
        (MARGIN - 1, 20 * GIB, True),
        (MARGIN, 20 * GIB, False),
        (MARGIN - 1, GIB, False),
    ],
)
def test_an_engine_that_is_awake_can_allocate(free: int, of_others: int, gives_back: bool) -> None:
    gpu = Gpu(free, of_others)
    release_if_short(gpu)
    assert gpu.gave_back == gives_back


@pytest.mark.parametrize("parts", [(WEIGHTS,), (CACHE,), (WEIGHTS, CACHE)])
def test_an_engine_that_wakes_takes_no_more_than_its_budget_and_a_margin(
    parts: tuple[EnginePart, ...],
) -> None:
    """Its weights are part of `gpu_memory_utilization`, and what it keeps asleep is there already."""
    rollout = {"tensor_model_parallel_size": 2, "gpu_memory_utilization": 0.25}
    given = config(model={"path": "model", "dtype": "bfloat16"}, rollout=rollout)
    engine = EngineMemory.of_numbers(given, 7 * GIB)
    takes = {WEIGHTS: 7 * GIB, CACHE: 25 * GIB - 7 * GIB - 2 * GIB}
    assert engine.woken(parts, given, 100 * GIB) == sum(takes[part] for part in parts) + MARGIN
    assert engine.woken((CACHE,), given, 10 * GIB) == MARGIN, "a budget that the weights exceed"


def test_a_fixed_cache_is_what_the_planner_made_of_the_budget() -> None:
    """So the learner's count for an engine whose cache the planner fixed is that budget, within a margin."""
    sizes = {
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_hidden_layers": 28,
    }
    shape = ModelShape.of({**sizes, "intermediate_size": 18944, "vocab_size": 152064})
    assert shape is not None
    free = config(model={"path": "model", "dtype": "bfloat16"}, rollout={"gpu_memory_utilization": 0.4})
    budget = int(0.4 * 80 * GIB)
    parts = EngineMemory.of(free, shape).generation(budget)
    kwargs = {"kv_cache_memory_bytes": parts["kv cache"]}
    fixed = free.model_copy(update={"rollout": free.rollout.model_copy(update={"engine_kwargs": kwargs})})
    for given in (free, fixed):
        engine = EngineMemory.of_numbers(given, shape.num_parameters)
        assert engine.weights == parts["weights"]
        assert budget - 2 * GIB <= engine.woken((WEIGHTS, CACHE), given, 80 * GIB) <= budget + GIB
    assert engine.woken((CACHE,), fixed, 80 * GIB) == parts["kv cache"] + MARGIN


def test_an_engine_that_was_seen_to_take_less_than_planned_needs_less(ranks: Ranks) -> None:
    given = config(
        model={"path": "model", "dtype": "bfloat16"},
        rollout={"engine_kwargs": {"kv_cache_memory_bytes": 12 * GIB}},
    )
    engine = EngineMemory.of_numbers(given, 7 * GIB)
    assert [
        engine.woken(parts, given, 100 * GIB, 27 * GIB) for parts in ((WEIGHTS,), (CACHE,), (WEIGHTS, CACHE))
    ] == [
        14 * GIB + MEASURED_MARGIN,
        13 * GIB + MEASURED_MARGIN,
        27 * GIB + MEASURED_MARGIN,
    ]
    gpu = Gpu(28 * GIB)
    planned, seen = (
        release_memory(
            (WEIGHTS,), lambda parts, seen=seen: engine.woken(parts, given, gpu.total, seen), gpu, ranks
        )
        for seen in (0, 27 * GIB)
    )
    assert (planned.has_room, seen.has_room, gpu.gave_back) == (False, True, 0)
    assert engine.woken((CACHE,), given, 100 * GIB, 9 * GIB) == MEASURED_MARGIN


def test_on_a_cpu_there_is_room(ranks: Ranks) -> None:
    memory = GpuMemory(torch.device("cpu"))
    made = release_memory((CACHE,), needed, memory, ranks)
    assert made == ReleasedMemory(freed_bytes=0, has_room=True)
