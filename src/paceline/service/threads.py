"""Blocking calls beside the event loop; if the caller is cancelled, it waits until its call has returned."""

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
    """Calls like `asyncio.to_thread`, but a caller that is cancelled still waits for the thread.

    What the function uses is therefore never closed, removed or used again while it still runs.
    """
    return await _finished(functools.partial(function, *args, **kwargs), lambda: None)


async def in_stoppable_thread(function: Callable[[Callable[[], bool]], T]) -> T:
    """`in_thread` for what may take long: `function` gets a function that says whether it should stop."""
    stopped = threading.Event()
    return await _finished(functools.partial(function, stopped.is_set), stopped.set)


async def _finished(call: Callable[[], T], on_cancel: Callable[[], None]) -> T:
    context = contextvars.copy_context()
    # Not a task: at the loop's end all tasks are cancelled, and the thread would go on.
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
