"""Runs blocking calls in threads; a cancelled caller still waits until its call has returned."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls like `asyncio.to_thread`, but a cancelled caller still waits for the thread.

    So nothing that the function uses is closed, removed or reused while it runs.
    """
    return await _finished(functools.partial(function, *args, **kwargs), lambda: None)


async def in_stoppable_thread(function: Callable[[Callable[[], bool]], T]) -> T:
    """Calls like `in_thread`, for long work; `function` gets a function that returns whether to stop."""
    stopped = threading.Event()
    return await _finished(functools.partial(function, stopped.is_set), stopped.set)


async def _finished(call: Callable[[], T], on_cancel: Callable[[], None]) -> T:
    context = contextvars.copy_context()
    # Not a task: the loop's end cancels all tasks, but the thread would go on.
    running = asyncio.get_running_loop().run_in_executor(None, context.run, call)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
    if cancelled is not None:
        running.exception()
        raise cancelled
    return running.result()
