"""Calls in threads: a caller that is cancelled waits for its thread."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable

import pytest

from paceline.service.threads import in_stoppable_thread, in_thread


def fail(message: str) -> None:
    raise ValueError(message)


async def test_the_result_the_error_and_the_context_are_those_of_the_call() -> None:
    variable = contextvars.ContextVar("variable", default="none")
    variable.set("of the caller")
    assert await in_thread(variable.get) == "of the caller"
    assert await in_thread(int, "11", base=2) == 3
    with pytest.raises(ValueError, match="because"):
        await in_thread(fail, "because")


@pytest.mark.parametrize("error", [None, "too late for anybody"])
async def test_a_cancelled_caller_ends_after_its_thread_however_often_it_is_cancelled(
    error: str | None,
) -> None:
    began, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        goes_on.wait(60)
        ended.set()
        if error:
            fail(error)

    caller = asyncio.create_task(in_thread(work))
    assert await asyncio.to_thread(began.wait, 60)
    for _ in range(3):
        caller.cancel()
        await asyncio.sleep(0.01)
        assert not caller.done()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()


async def test_what_may_take_long_is_told_to_stop() -> None:
    began, told = threading.Event(), []

    def work(stopped: Callable[[], bool]) -> None:
        began.set()
        deadline = time.monotonic() + 60
        while not stopped() and time.monotonic() < deadline:
            time.sleep(0.01)
        told.append(stopped())

    caller = asyncio.create_task(in_stoppable_thread(work))
    assert await asyncio.to_thread(began.wait, 60)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert told == [True]
