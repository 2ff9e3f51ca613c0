"""Runs a service's main function: signals, tasks, ordered shutdown, exit code.

PACELINE_STOP_GRACE_S tells the process how long after SIGTERM it will be killed. A service that a step needs
uses that time (`ServiceContext.before_stopping`); without the variable it ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any

from paceline.core.errors import ConfigError, PacelineError, exit_code
from paceline.service.member.shutdown import ShutdownStack, Step
from paceline.service.observability import telemetry
from paceline.service.observability.logs import setup_logging
from paceline.service.observability.loop_lag import measure_loop_lag
from paceline.service.process import die_with_parent

log = logging.getLogger(__name__)

STOP_GRACE = "PACELINE_STOP_GRACE_S"
"""Environment variable with the seconds from SIGTERM to SIGKILL; 0 or missing: end at once."""

EXIT_INTERRUPTED = 128 + signal.SIGTERM
"""The exit code of a service with a grace period that SIGTERM ended before the run was over."""

# The longest ordered shutdown, reserved from the grace period.
_ENDING_S = 30.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# The kernel may send a parent's death signal once per thread of the parent; all count as one request to stop.
_SAME_SIGNAL_S = 0.5


class ServiceContext:
    """Holds a service's tasks, its shutdown steps and the request to stop.

    Attributes:
        is_terminated: whether SIGTERM has arrived in a process with a grace period.
        is_over: whether no work is left, so that SIGTERM does not interrupt the run.
    """

    def __init__(self, name: str, tasks: asyncio.TaskGroup) -> None:
        self.name = name
        self.stopping = asyncio.Event()
        self.is_terminated = self.is_over = False
        self.ask_first: Callable[[], object] | None = None
        self._tasks = tasks
        self._stack = ShutdownStack()
        # Running tasks only: an ended task keeps its traceback, and so everything that its frames held.
        self._spawned: dict[asyncio.Task[Any], None] = {}

    def defer(self, name: str, step: Step, *, budget_s: float = 5.0) -> None:
        """Adds a shutdown step; steps run in reverse order, also after an error."""
        self._stack.defer(name, step, budget_s=budget_s)

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a named task beside main, cancelled after the deferred steps; its error ends the service."""
        task = self._tasks.create_task(work, name=f"{self.name}/{name}")
        self._spawned[task] = None
        task.add_done_callback(lambda task: self._spawned.pop(task, None))
        return task

    async def stopping_or(self, *work: asyncio.Future[Any]) -> None:
        """Returns when one of `work` is done or the service is asked to stop."""
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

    def before_stopping(self, ask: Callable[[], object] | None) -> None:
        """Makes the first SIGTERM call `ask`, not `stop`, if there is a grace period; None undoes it.

        The caller must call `stop` once the service may end; near the period's end it is called anyway.
        """
        self.ask_first = ask

    async def _finish(self) -> None:
        await self._stack.close()
        for task in [*self._spawned]:
            task.cancel()


Main = Callable[[ServiceContext], Awaitable[None]]


def run_service(main: Main, *, name: str, grace_s: float = 15.0) -> int:
    """Runs `main` to its end, logs its error if any, and returns the exit code (`core.errors.exit_code`).

    SIGTERM and SIGINT set `context.stopping`, and `main` should then return. `main` is cancelled after
    `grace_s` seconds or at a second signal. The deferred steps run in every case. If the process has a grace
    period and `context.before_stopping` was called, SIGTERM sets `context.stopping` only near the period's
    end.
    """
    die_with_parent()
    setup_logging(name)
    contexts: list[ServiceContext] = []
    try:
        asyncio.run(_serve(main, name, grace_s, contexts))
    except BaseExceptionGroup as group:
        _report(group)
        return exit_code(group)
    except asyncio.CancelledError:
        log.error("fatal: did not stop within %g s, or was asked twice", grace_s)
        return _code_of(contexts) or 1
    finally:
        telemetry.shutdown()
    log.info("stopped")
    return _code_of(contexts)


def stop_grace_s() -> float:
    """Returns the seconds from SIGTERM to SIGKILL; raises ConfigError if the variable is not a number."""
    text = os.environ.get(STOP_GRACE, "") or "0"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"{STOP_GRACE}={text!r} must be a number of seconds, 0 for none")
    return seconds


def _code_of(contexts: Sequence[ServiceContext]) -> int:
    cut_short = any(context.is_terminated and not context.is_over for context in contexts)
    return EXIT_INTERRUPTED if cut_short else 0


async def _serve(main: Main, name: str, grace_s: float, contexts: list[ServiceContext]) -> None:
    context: ServiceContext | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            context = ServiceContext(name, tasks)
            contexts.append(context)
            context.spawn("event-loop lag", measure_loop_lag())
            with _signals(context, grace_s, stop_grace_s()):
                await main(context)
                await context._finish()
    finally:
        # After an error the tasks are gone; the deferred steps still run in order.
        if context is not None:
            await context._finish()


@contextlib.contextmanager
def _signals(context: ServiceContext, grace_s: float, stop_grace_s: float) -> Iterator[None]:
    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    timer: list[asyncio.TimerHandle] = []
    asked_at = -math.inf

    def stop(reason: str) -> None:
        context.stop(reason)
        timer.append(loop.call_later(grace_s, _cancel, me))

    def on_signal(number: int) -> None:
        nonlocal asked_at
        if timer and loop.time() - asked_at < _SAME_SIGNAL_S:
            return
        is_first, asked_at = not timer, loop.time()
        context.is_terminated |= number == signal.SIGTERM and stop_grace_s > 0
        if context.stopping.is_set() and not is_first:
            _cancel(me)
        elif is_first and context.is_terminated and context.ask_first and not context.stopping.is_set():
            wait_s = max(0.0, stop_grace_s - _ENDING_S)
            timer.append(loop.call_later(wait_s, stop, f"{wait_s:g} s after SIGTERM ({STOP_GRACE})"))
            context.ask_first()
        else:
            stop(signal.Signals(number).name)

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
