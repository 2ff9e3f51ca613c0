"""Ends asyncio tasks, and waits for events."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks and waits until all have ended; drops their results and errors."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def wait_at_most(event: asyncio.Event, seconds: float) -> None:
    """Returns once the event is set, or after `seconds`."""
    with contextlib.suppress(TimeoutError):
        # `wait_for` would ignore a cancellation at the moment in which the wait ends.
        async with asyncio.timeout(seconds):
            await event.wait()
