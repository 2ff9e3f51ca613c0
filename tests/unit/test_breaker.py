"""The breaker of a remote reward service: when calls are made, and when one alone tries."""

from __future__ import annotations

import asyncio
import time

import pytest

from paceline.reward.outside import breaker
from paceline.reward.outside.breaker import Breaker, BreakerState


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(breaker, "_LIMIT", 3)


def soon() -> float:
    return time.monotonic() + 600


async def test_it_opens_after_failures_in_a_row_alone() -> None:
    tested = Breaker("judge")
    for reason in ("fails", "fails", "answers", "fails", "fails"):
        assert await tested.admit(soon())
        if reason == "answers":
            tested.succeeded()
        else:
            tested.failed(reason)
    assert tested.state is BreakerState.CLOSED
    tested.failed("no answer")
    assert tested.state is BreakerState.OPEN
    assert tested.explanation == "judge did not answer 3 times in a row: no answer"
    assert not await tested.admit(time.monotonic())


async def test_who_follows_the_run_hears_of_it_once() -> None:
    heard: list[str] = []
    tested = Breaker("judge", heard.append)
    for _ in range(3):
        tested.failed("no answer")
    for _ in range(2):
        assert await tested.admit(soon())
        tested.failed("no answer")
    assert heard == [
        "judge did not answer 3 times in a row: no answer; items for it wait, and single calls try it"
    ]
    assert await tested.admit(soon())
    tested.succeeded()
    tested.succeeded()
    assert heard[1:] == ["judge answers again"]


async def test_one_call_tries_while_the_others_wait() -> None:
    tested = Breaker("judge")
    for _ in range(3):
        tested.failed("no answer")
    waiting = [asyncio.create_task(tested.admit(soon())) for _ in range(4)]
    done, others = await asyncio.wait(waiting, timeout=120, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result() for task in done] == [True]
    assert tested.state is BreakerState.TRYING
    tested.called_off()
    done, others = await asyncio.wait(others, timeout=120, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    tested.succeeded()
    assert await asyncio.gather(*others) == [True, True]
    assert tested.state is BreakerState.CLOSED


async def test_a_try_that_fails_doubles_the_pause() -> None:
    tested, pauses = Breaker("judge"), []
    for _ in range(3):
        tested.failed("no answer")
    for _ in range(3):
        began = time.monotonic()
        assert await tested.admit(soon())
        pauses.append(time.monotonic() - began)
        tested.failed("no answer")
    assert pauses[0] >= 0.04
    assert pauses[1] >= 0.09
    assert pauses[2] >= 0.19


async def test_who_waits_past_the_time_is_not_admitted() -> None:
    tested = Breaker("judge")
    for _ in range(3):
        tested.failed("no answer")
    assert await tested.admit(soon())
    assert not await tested.admit(time.monotonic() + 0.05)


async def test_the_pause_has_a_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A service that is back is found soon, however long it was away."""
    monkeypatch.setattr(breaker, "_LONGEST_PAUSE_S", 0.1)
    tested = Breaker("judge")
    for _ in range(3):
        tested.failed("no answer")
    for _ in range(4):
        assert await tested.admit(soon())
        tested.failed("no answer")
    assert [record.args[-1] for record in caplog.records if record.args] == [0.05, 0.1, 0.1, 0.1, 0.1]
