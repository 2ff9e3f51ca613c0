"""Which rank is silent, turn by turn."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.learner.distributed import heartbeats
from paceline.learner.distributed.heartbeats import Heartbeats, Silence

pytestmark = pytest.mark.torch


def test_a_rank_is_lost_after_so_many_turns_without_a_new_count() -> None:
    silence = Silence([0, 2], limit=3)
    silence.heard({0: 5, 2: 5})
    assert [silence.turn(), silence.turn()] == [None, None]
    silence.heard({0: 6, 2: 5})  # the old count is no sign of life
    assert silence.silent_for(2) == 2
    assert silence.turn() == 2


def test_the_store_itself_is_silent_when_rank_0_is_frozen() -> None:
    silence = Silence([0, 2], limit=3)
    silence.heard({0: 1, 2: 1})
    assert [silence.turn(), silence.turn(), silence.turn()] == [None, None, 0]


def test_a_rank_that_was_paused_itself_takes_nobody_for_dead() -> None:
    silence = Silence([1], limit=3)
    for count in range(20):
        # One turn, however long it took; the others beat meanwhile.
        assert silence.turn() is None
        silence.heard({1: count})


class Store(dict[str, bytes]):
    """A group's store in one process."""

    def clone(self) -> Store:
        return self

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self[key] for key in keys]


def test_rank_0_hears_once_that_the_process_of_another_rank_is_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, told = Store(), threading.Semaphore(0)
    monkeypatch.setattr(heartbeats, "INTERVAL_S", 0.01)
    monkeypatch.setattr(heartbeats, "agree", lambda *_: None)

    def rank(number: int, **options: Any) -> Heartbeats:
        ranks: Any = SimpleNamespace(world=SimpleNamespace(rank=number, size=2), store=store)
        lost = pytest.fail
        return Heartbeats(ranks, limit_s=3000.0, lost=lambda error: lost(str(error)), **options)

    for number in range(2):
        store.set(heartbeats._KEY.format(rank=number), "0")
    with rank(0, told=told.release), rank(1) as other:
        beat_on(store)
        assert not told.acquire(blocking=False)
        other.is_told.set()
        assert told.acquire(timeout=120)
        # It beats on, so that nobody takes it for dead; and that it was told is said once.
        beat_on(store)
        assert not told.acquire(blocking=False)


def beat_on(store: Store) -> None:
    """Returns when rank 1 has beaten some more times."""
    beats, deadline = set[bytes](), time.monotonic() + 120
    while len(beats) < 4:
        assert time.monotonic() < deadline
        beats.add(store[heartbeats._KEY.format(rank=1)])
