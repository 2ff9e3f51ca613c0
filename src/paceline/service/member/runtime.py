"""The entry point of every service: signals, tasks, ordered shutdown, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

from paceline.core.errors import PacelineError, exit_code
from paceline.service.member.shutdown import ShutdownStack, Step
from paceline.service.observability import telemetry
from paceline.service.observability.logs import setup_logging
from paceline.service.observability.loop_lag import measure_loop_lag
from paceline.service.process import die_with_parent

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# When a parent with several threads is killed, the kernel sends its death signal more than once: not a second
# request.
_SAME_SIGNAL_S = 0.5


class ServiceContext:
    """The process around a service's main function: its tasks, its shutdown steps, the request to stop."""

    def __init__(self, name: str, tasks: asyncio.TaskGroup) -> None:
        self.name = name
        self.stopping = asyncio.Event()
        self._tasks = tasks
        self._stack = ShutdownStack()
        # Those that run. One that has ended keeps its traceback, and with it what its frames held.
        self._spawned: dict[asyncio.Task[Any], None] = {}

    def defer(self, name: str, step: Step, *, budget_s: float = 5.0) -> None:
        """Adds a step to the end of the service; steps run in reverse order, also after an error."""
        self._stack.defer(name, step, budget_s=budget_s)

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a named task beside main; its error ends the service. Cancelled after the deferred steps."""
        task = self._tasks.create_task(work, name=f"{self.name}/{name}")
        self._spawned[task] = None
        task.add_done_callback(lambda task: self._spawned.pop(task, None))
        return task

    async def stopping_or(self, *work: asyncio.Future[Any]) -> None:
        """Returns when one of `work` is done, or the service is asked to stop, whichever comes first."""
        asked = asyncio.create_task(self.stopping.wait(), name="stopping")
        try:
            await asyncio.wait({asked, *work}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()

    def stop(self, reason: str) -> None:
        """Asks the service's `main` to return."""
        if not self.stopping.is_set():
            log.info("stopping: %s", reason)
            self.stopping.set()

    async def _finish(self) -> None:
        await self._stack.close()
        for task in [*self._spawned]:
            task.cancel()


Main = Callable[[ServiceContext], Awaitable[None]]


def run_service(main: Main, *, name: str, grace_s: float = 15.0) -> int:
    """Runs `main` to its end, logs its error if any, and returns the exit code (`core.errors.exit_code`).

    SIGTERM and SIGINT set `context.stopping`, and main should then return. It is cancelled after `grace_s`
    seconds or at a second signal. The deferred steps run in every case.
    """
    die_with_parent()
    setup_logging(name)
    try:
        asyncio.run(_serve(main, name, grace_s))
    except BaseExceptionGroup as group:
        _report(group)
        return exit_code(group)
    except asyncio.CancelledError:
        log.error("fatal: not stopped within %g s of being asked to, or asked twice", grace_s)
        return 1
    finally:
        telemetry.shutdown()
    log.info("stopped")
    return 0


async def _serve(main: Main, name: str, grace_s: float) -> None:
    context: ServiceContext | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            context = ServiceContext(name, tasks)
            context.spawn("event-loop lag", measure_loop_lag())
            with _signals(context, grace_s):
                await main(context)
                await context._finish()
    finally:
        # After an error the tasks are gone; the deferred steps still run in order.
        if context is not None:
            await context._finish()


@contextlib.contextmanager
def _signals(context: ServiceContext, grace_s: float) -> Iterator[None]:
    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    timer: list[asyncio.TimerHandle] = []
    asked_at = -math.inf

    def on_signal(number: int) -> None:
        nonlocal asked_at
        if context.stopping.is_set() and timer:
            if loop.time() - asked_at >= _SAME_SIGNAL_S:
                _cancel(me)
            return
        asked_at = loop.time()
        context.stop(signal.Signals(number).name)
        timer.append(loop.call_later(grace_s, _cancel, me))

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        for handle in timer:
            handle.cancel()


def _cancel(task: asyncio.Task[Any] | None) -> None:
    if task is not None:
        task.cancel("not stopped in time")


def _report(error: BaseException) -> None:
    """Logs one line for Paceline's own errors, and a traceback with the line for all others."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            _report(part)
    elif isinstance(error, PacelineError):
        log.error("fatal: %s", error)
    else:
        log.error("traceback", exc_info=error)
        log.error("fatal: %s: %s", type(error).__name__, error)
