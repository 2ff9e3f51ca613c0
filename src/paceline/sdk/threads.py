"""Runs a user's functions in daemon threads, so that a hanging one does not keep the process alive."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from paceline.core.user_functions.reward_function import describe
from paceline.service.tasks import cancel

T = TypeVar("T")

_STOP: Final = None
_BLOCKED_AFTER_S: Final = 1.0
_STUCK: Final = "{} calls of the function hang: start this program again"


@dataclass(slots=True)
class _Call:
    function: Callable[[], object]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[object]

    def run(self) -> None:
        try:
            outcome, error = self.function(), None
        except BaseException as raised:  # noqa: BLE001  a user's code: what it raises belongs to its caller
            outcome, error = None, raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits any more
            self.loop.call_soon_threadsafe(self._settle, outcome, error)

    def _settle(self, outcome: object, error: BaseException | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(outcome)
        else:
            self.done.set_exception(_harmless(error))


class _Thread:
    """A thread and its calls; if it is abandoned, it ends after the current call."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="paceline function", daemon=True).start()

    def put(self, call: _Call | None) -> None:
        self._calls.put(call)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not _STOP:
            call.run()


class Threads:
    """Runs blocking functions, `size` at a time.

    A thread whose call exceeds the deadline is abandoned and replaced, until `size` threads hang.

    Args:
        size: maximum number of concurrent calls.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._slots = asyncio.Semaphore(size)
        self._idle: list[_Thread] = []
        self.num_hung = 0

    @property
    def is_stuck(self) -> bool:
        """Whether so many calls hang that no further thread is started."""
        return self.num_hung >= self._size

    async def call(self, function: Callable[[], T], *, timeout_s: float) -> T:
        """Runs a function in a thread.

        Raises:
            TimeoutError: the call takes longer than `timeout_s`; it goes on in its thread.
            ConnectionError: too many calls hang.
            Exception: what the function raises.
        """
        # This wait ends, because every call that holds a slot has a deadline.
        async with self._slots:
            if self.is_stuck:
                raise ConnectionError(_STUCK.format(self.num_hung))
            thread = self._idle.pop() if self._idle else _Thread()
            loop = asyncio.get_running_loop()
            call = _Call(function, loop, loop.create_future())
            thread.put(call)
            try:
                await asyncio.wait({call.done}, timeout=timeout_s)
                if not call.done.done():
                    self.num_hung += 1
                    call.done.add_done_callback(self._on_late)
                    thread.put(_STOP)
                    raise TimeoutError(f"not done within {timeout_s:g} s")
            except asyncio.CancelledError:
                thread.put(_STOP)
                raise
            self._idle.append(thread)
            return call.done.result()  # type: ignore[return-value]

    def close(self) -> None:
        """Ends the threads that are idle."""
        for thread in self._idle:
            thread.put(_STOP)
        self._idle.clear()

    def _on_late(self, done: asyncio.Future[object]) -> None:
        self.num_hung -= 1
        if not done.cancelled():
            done.exception()


class LoopThread:
    """Runs async functions in a separate event loop, `size` at a time.

    A blocking function stalls the others in this loop, but not the caller's loop. The stalled loop is
    abandoned and replaced, until that has happened `size` times.

    Args:
        size: maximum number of concurrent calls.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._slots = asyncio.Semaphore(size)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_hung = 0

    @property
    def is_stuck(self) -> bool:
        """Whether so many loops hang that no further one is started."""
        return self._num_hung >= self._size

    async def call(self, function: Callable[[], Awaitable[T]], *, timeout_s: float) -> T:
        """Awaits a function in the separate loop.

        Raises:
            TimeoutError: it takes longer than `timeout_s`.
            ConnectionError: too many loops hang.
            Exception: what the function raises.
        """
        # This wait ends, because every call that holds a slot has a deadline.
        async with self._slots:
            if self.is_stuck:
                raise ConnectionError(_STUCK.format(self._num_hung))
            loop = self._loop = self._loop or _start_loop()
            done = asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(_contained(function, timeout_s), loop)
            )
            try:
                await asyncio.wait({done}, timeout=timeout_s + _BLOCKED_AFTER_S)
            finally:
                if not done.done():
                    done.cancel()
            if not done.cancelled():
                return done.result()
            if self._loop is loop:
                self.close()
                self._num_hung += 1
            raise TimeoutError(f"not done within {timeout_s:g} s, and it blocks its event loop")

    def close(self) -> None:
        """Ends the loop; a blocked one ends when its function returns."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run_loop, args=(loop,), name="paceline async function", daemon=True).start()
    return loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(_cancel_others())
    finally:
        loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await cancel(*others)


async def _contained(function: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            return await function()
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001  a user's code, as above
        raise _harmless(error) from None


def _harmless(error: BaseException) -> Exception:
    """Replaces StopIteration, which a future cannot carry, and SystemExit, which would end the process."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(describe("the function", error))
