"""Calls a method of `worker.py` on every TP rank, with a deadline; raises the error that a rank reports."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, Final, TypeVar

from paceline.core.errors import DeadlineError, ModelError, PacelineError, PeerLostError, WeightSyncError
from paceline.core.members import LocalPart, RankRef, peer_from_plain
from paceline.rollout.engines.vllm.start.cause import of_death

GRACE_S: Final = 10.0
"""Extra seconds that the engine may take to answer, beyond the deadline of its workers."""

T = TypeVar("T")
Reply = dict[str, Any]


async def call_workers(llm: Any, method: str, args: tuple[Any, ...], timeout_s: float) -> list[Reply]:
    """Returns every rank's reply, by rank.

    Args:
        llm: vLLM's AsyncLLM.
        args: plain values (int, float, str, bytes, list, dict).
        timeout_s: time that the workers themselves have.

    Raises:
        DeadlineError: the engine did not answer; or a rank reports that a peer did not.
        PeerLostError: the engine died; or a rank reports that a peer did.
        ModelError, WeightSyncError: as a rank reports.
    """
    allowed_s = timeout_s + GRACE_S
    call = llm.collective_rpc(method, timeout=allowed_s, args=args)
    replies: list[Reply] = await answered(llm, call, method, allowed_s)
    _raise_reported(replies)
    return replies


async def answered(llm: Any, call: Awaitable[T], what: str, seconds: float) -> T:
    """Awaits an answer of the engine.

    Raises:
        DeadlineError: none came in time; `what` is named as the phase.
        PeerLostError: the engine died.
        WeightSyncError: the call raised.
    """
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError:
        hint = "its processes hang; the engine must be restarted"
        raise DeadlineError(phase=what, peer=LocalPart.ENGINE, seconds=seconds, hint=hint) from None
    except Exception as error:  # vLLM wraps what a worker raised in a bare Exception
        if llm.errored:
            raise engine_died() from error
        raise WeightSyncError(f"{what} failed in the engine: {error}") from error


def engine_died() -> PeerLostError:
    """Returns the error for a dead engine, with what its processes said last."""
    cause = of_death()
    return PeerLostError(
        f"the inference engine has died: {cause or 'its last lines are in the log of this server'}",
        peer=LocalPart.ENGINE,
    )


def _raise_reported(replies: Sequence[Reply]) -> None:
    errors = [(reply["error"], f"TP rank {rank}") for rank, reply in enumerate(replies) if "error" in reply]
    if not errors:
        return
    # A rank that fails breaks the connections of its peers, this engine's other ranks included. Report the
    # cause, not a consequence; of lost peers, prefer a known one that is not of this engine.
    peers = [peer_from_plain(error.get("peer", "")) for error, _ in errors]
    own_ranks = {peer_from_plain(error["rank"]) for error, _ in errors if error["rank"]}

    def distance(number: int) -> int:
        if errors[number][0]["kind"] not in ("DeadlineError", "PeerLostError"):
            return 0
        peer = peers[number]
        if isinstance(peer, LocalPart):
            return 1
        if peer in own_ranks:
            return 4
        return 2 if isinstance(peer, RankRef) and peer.number is not None else 3

    raise _make_error(*errors[min(range(len(errors)), key=distance)])


def _make_error(error: Reply, where: str) -> PacelineError:
    kind, message = error["kind"], f"{where}: {error['message']}"
    if kind == "DeadlineError":
        phase = f"{where}: {error['phase']}"
        peer = peer_from_plain(error["peer"])
        return DeadlineError(phase=phase, peer=peer, seconds=error["seconds"], hint=error["hint"])
    if kind == "PeerLostError":
        return PeerLostError(message, peer=peer_from_plain(error["peer"]))
    if kind == "ModelError":
        return ModelError(message)
    return WeightSyncError(message if kind == "WeightSyncError" else f"{where}: {kind}: {error['message']}")
