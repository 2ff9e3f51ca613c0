"""Runs named shutdown steps in reverse order, each within its own time budget."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

Step = Callable[[], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShutdownStepResult:
    """The outcome of a shutdown step; `error` is None after success."""

    name: str
    seconds: float
    error: str | None


class ShutdownStack:
    """Holds steps to run at the end. A step that fails or runs out of time is logged; the next step runs."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, Step, float]] = []

    def defer(self, name: str, step: Step, *, budget_s: float = 5.0) -> None:
        """Adds a step; the last step added runs first."""
        self._steps.append((name, step, budget_s))

    async def close(self) -> list[ShutdownStepResult]:
        """Runs the deferred steps, once."""
        outcomes = []
        while self._steps:
            outcomes.append(await _take(*self._steps.pop()))
        return outcomes


async def _take(name: str, step: Step, budget_s: float) -> ShutdownStepResult:
    started = time.monotonic()
    error: str | None = None
    try:
        async with asyncio.timeout(budget_s):
            await step()
    except TimeoutError:
        error = f"not done within {budget_s:g} s"
    except Exception as raised:  # noqa: BLE001 - the other steps must run; the error is logged below
        error = f"{type(raised).__name__}: {raised}"
    seconds = time.monotonic() - started
    if error is None:
        log.info("shutdown: %s done in %.2f s", name, seconds)
    else:
        log.warning("shutdown: %s failed after %.2f s: %s", name, seconds, error)
    return ShutdownStepResult(name=name, seconds=seconds, error=error)
