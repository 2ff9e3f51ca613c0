"""Calls a method of `worker.py` on every TP rank, with a deadline; raises the error that a rank reports."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Final, TypeVar

from paceline.core.errors import DeadlineError, PeerLostError, WeightSyncError
from paceline.core.members import LocalPart
from paceline.rollout.engines.answers import Reply, raise_reported
from paceline.rollout.engines.vllm.start.cause import of_death

GRACE_S: Final = 10.0
"""Extra seconds that the engine may take to answer, beyond the deadline of its workers."""

T = TypeVar("T")


async def call_workers(llm: Any, method: str, args: tuple[Any, ...], timeout_s: float) -> list[Reply]:
    """Returns every rank's reply, by rank; raises as `RankedEngine.call_workers` does.

    Args:
        args: plain values (int, float, str, bytes, list, dict).
        timeout_s: deadline of the workers.
    """
    allowed_s = timeout_s + GRACE_S
    call = llm.collective_rpc(method, timeout=allowed_s, args=args)
    replies: list[Reply] = await answered(llm, call, method, allowed_s)
    raise_reported(replies)
    return replies


async def answered(llm: Any, call: Awaitable[T], what: str, seconds: float) -> T:
    """Awaits an answer of the engine.

    Raises:
        DeadlineError: no answer came in time; `what` is named as the phase.
        PeerLostError: the engine died.
        WeightSyncError: the call raised.
    """
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError:
        hint = "its processes hang; the engine must be restarted"
        raise DeadlineError(phase=what, peer=LocalPart.ENGINE, seconds=seconds, hint=hint) from None
    except Exception as error:  # vLLM wraps a worker's exception in a bare Exception
        if llm.errored:
            raise engine_died() from error
        raise WeightSyncError(f"{what} failed in the engine: {error}") from error


def engine_died() -> PeerLostError:
    """Returns the error for a dead engine, with the last exception of its processes."""
    cause = of_death()
    return PeerLostError(
        f"the inference engine has died: {cause or 'its last lines are in the log of this server'}",
        peer=LocalPart.ENGINE,
    )
