"""Ends asyncio tasks."""

from __future__ import annotations

import asyncio
from typing import Any


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks and waits until all have ended; drops their results and errors."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
