"""Back-pressure by length: a writer waits while a mailbox is full."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from paceline.broker.base import Broker, Outgoing
from paceline.core.errors import DeadlineError

_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5


async def append_when_room(
    broker: Broker, messages: Sequence[Outgoing], *, max_length: int, timeout_s: float
) -> list[str]:
    """Appends once each of the messages' streams has fewer than `max_length` entries.

    Acknowledged entries count until the stream is trimmed, so a full stream is trimmed first. Writers that
    find room at the same moment may each exceed the bound by one batch; the bound protects the broker's
    memory and is not exact.

    Raises:
        DeadlineError: a stream was still full after `timeout_s` seconds; the message names it.
    """
    await wait_for_room(broker, messages, max_length=max_length, timeout_s=timeout_s)
    return await broker.append(messages)


async def wait_for_room(
    broker: Broker, messages: Sequence[Outgoing], *, max_length: int, timeout_s: float
) -> None:
    """Returns once each of the messages' streams has fewer than `max_length` entries.

    Raises:
        DeadlineError: as in `append_when_room`.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    for stream in dict.fromkeys(message.stream for message in messages):
        # Redis sends no message when a stream has room again, so this is the only place that polls.
        while await broker.length(stream) >= max_length:
            if await broker.trim(stream) > 0:
                continue
            if time.monotonic() >= deadline:
                raise DeadlineError(
                    phase="APPEND",
                    peer=f"the readers of {stream}",
                    seconds=timeout_s,
                    hint=f"it holds {max_length} entries or more: its readers are too slow or gone, or "
                    "broker.max_stream_length is too small",
                )
            await asyncio.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
