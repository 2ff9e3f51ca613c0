"""The learner gives cached memory back where an engine on its GPU lacks it, and only there."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from paceline.core.members import EnginePart
from paceline.learner.distributed import engine_memory
from paceline.learner.distributed.engine_memory import (
    GpuMemory,
    ReleasedMemory,
    release_if_short,
    release_memory,
)
from paceline.learner.distributed.ranks import Ranks
from paceline.sizing.engine_memory import MARGIN, MEASURED_MARGIN, EngineSize
from support.cli_configs import config
from support.learner_ranks import alone

GIB = 1 << 30
WEIGHTS, CACHE = EnginePart.WEIGHTS, EnginePart.KV_CACHE
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with alone() as group:
        yield group


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
    made = release_memory(parts, lambda total: EngineSize(weights=total // 10, kv_cache=20 * GIB), gpu, ranks)
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
    size = EngineSize(weights=10 * GIB, kv_cache=20 * GIB)
    for free, own in ((90 * GIB, True), (10 * GIB + MARGIN, False)):
        made = release_memory((WEIGHTS,), lambda _: size, Gpu(free), ranks)
        assert made == ReleasedMemory(freed_bytes=10, has_room=own and others == (True, True))


def test_what_an_engine_takes_meanwhile_does_not_count(ranks: Ranks) -> None:
    class Shared(Gpu):
        def give_back(self) -> int:
            freed = super().give_back()
            self._now -= 50 * GIB
            return freed

    gpu = Shared(60 * GIB)
    assert (
        release_memory((), lambda total: EngineSize(weights=total, kv_cache=0), gpu, ranks).freed_bytes
        == 40 * GIB
    )


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


def test_the_size_of_an_engine_is_that_of_its_settings() -> None:
    rollout = {"tensor_model_parallel_size": 2, "gpu_memory_utilization": 0.25}
    given = config(model={"path": "model", "dtype": "bfloat16"}, rollout=rollout)
    assert EngineSize.of(given, 7 * GIB, 100 * GIB) == EngineSize(weights=7 * GIB, kv_cache=25 * GIB)
    fixed = config(
        model={"path": "model", "dtype": "float32"},
        rollout={**rollout, "engine_kwargs": {"kv_cache_memory_bytes": 3 * GIB}},
    )
    assert EngineSize.of(fixed, 7 * GIB, 100 * GIB) == EngineSize(weights=14 * GIB, kv_cache=3 * GIB)


def test_an_engine_that_was_seen_to_take_less_than_planned_needs_less(ranks: Ranks) -> None:
    given = config(
        model={"path": "model", "dtype": "bfloat16"},
        rollout={"engine_kwargs": {"kv_cache_memory_bytes": 12 * GIB}},
    )
    measured = EngineSize.of(given, 7 * GIB, 100 * GIB, 27 * GIB)
    assert measured == EngineSize(weights=14 * GIB, kv_cache=13 * GIB, margin=MEASURED_MARGIN)
    assert [measured.bytes_of(parts) for parts in ((WEIGHTS,), (CACHE,), (WEIGHTS, CACHE))] == [
        14 * GIB + MEASURED_MARGIN,
        13 * GIB + MEASURED_MARGIN,
        27 * GIB + MEASURED_MARGIN,
    ]
    gpu = Gpu(28 * GIB)
    planned = release_memory((WEIGHTS,), lambda total: EngineSize.of(given, 7 * GIB, total), gpu, ranks)
    seen = release_memory((WEIGHTS,), lambda _: measured, gpu, ranks)
    assert (planned.has_room, seen.has_room, gpu.gave_back) == (False, True, 0)
    assert EngineSize.of(given, 7 * GIB, 100 * GIB, 9 * GIB).kv_cache == 0


def test_on_a_cpu_there_is_room(ranks: Ranks) -> None:
    memory = GpuMemory(torch.device("cpu"))
    made = release_memory((CACHE,), lambda total: EngineSize(weights=1, kv_cache=total), memory, ranks)
    assert made == ReleasedMemory(freed_bytes=0, has_room=True)
