"""The rollout server's side of weight pushes: calls every TP rank's worker through the engine, with deadlines."""

from __future__ import annotations

import asyncio
from typing import Any, Final, Protocol

from paceline.core.errors import DeadlineError, ModelError, PacelineError, PeerLostError, WeightSyncError
from paceline.core.members import peer_from_plain
from paceline.weights.digest.agreement import DigestReport
from paceline.weights.geometry.layout import RankLayout
from paceline.weights.receipt import PushReceipt

WORKER_EXTENSION: Final = "paceline.rollout.engines.vllm.worker.PacelineWorkerExtension"
"""For `AsyncEngineArgs(worker_extension_cls=...)`"""

_GRACE_S: Final = 10.0
"""How much longer the engine may take to answer than its workers may take to act"""


class Engine(Protocol):
    """What is used of vLLM's AsyncLLM."""

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        """Calls a method of every worker."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Forgets cached keys and values; False where running requests still use them."""
        ...


class WeightReceiver:
    """Receives weights into a running engine.

    Nothing may be generated from the moment that a push begins until its verdict: the caller's gate sees to it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def describe(self, timeout_s: float = 60.0) -> list[RankLayout]:
        """What each TP rank needs, by rank."""
        replies = await self._call("paceline_describe", (), timeout_s)
        return [RankLayout.from_bytes(reply["layout"]) for reply in replies]

    async def join(self, spec_bytes: bytes, rank_offset: int, timeout_s: float) -> None:
        """All TP ranks join the group, from group rank `rank_offset` on; the learner must join meanwhile.

        Raises:
            DeadlineError, PeerLostError: a member did not come or went away.
            WeightSyncError: the spec does not fit this engine.
        """
        await self._call("paceline_join", (spec_bytes, rank_offset, timeout_s), timeout_s)

    async def receive(self, version: int, timeout_s: float) -> PushReceipt:
        """Receives one push and resets the prefix cache. After an error the weights may be half new.

        Raises:
            DeadlineError, PeerLostError: the learner stalled or died; join a new group.
            WeightSyncError: no group, or requests were running whose cached keys stem from the old weights.
        """
        # Ordered together, done one after the other: the engine need not come back for the second order.
        receiving = asyncio.create_task(self._call("paceline_receive", (version, timeout_s), timeout_s))
        resetting = asyncio.create_task(self._engine.reset_prefix_cache())
        try:
            replies = await receiving
            clean = await _within_grace(resetting)
        finally:
            receiving.cancel()
            resetting.cancel()
            await asyncio.gather(receiving, resetting, return_exceptions=True)
        if not clean:
            raise WeightSyncError(
                f"version {version} arrived while requests were running: they would mix it with cached keys and "
                "values of the old weights. Drain or abort them before a push"
            )
        return PushReceipt.merge([PushReceipt.from_bytes(reply["receipt"]) for reply in replies])

    async def digest(self, version: int, timeout_s: float = 60.0) -> tuple[DigestReport, ...]:
        """What lies in the parameters now, one report per TP rank, each headed with `version`."""
        replies = await self._call("paceline_digest", (version,), timeout_s)
        return tuple(DigestReport.from_bytes(reply["digests"]) for reply in replies)

    async def leave(self, timeout_s: float = 30.0) -> None:
        """All TP ranks leave the group. May be repeated."""
        await self._call("paceline_leave", (), timeout_s)

    async def _call(self, method: str, args: tuple[Any, ...], timeout_s: float) -> list[dict[str, Any]]:
        """Calls every worker; raises the error of a rank that reports one."""
        allowed_s = timeout_s + _GRACE_S
        try:
            async with asyncio.timeout(allowed_s):
                replies = await self._engine.collective_rpc(method, allowed_s, args)
        except TimeoutError:
            hint = "its workers hang; the engine must be restarted"
            raise DeadlineError(phase=method, peer="the engine", seconds=allowed_s, hint=hint) from None
        errors = [
            (reply["error"], f"TP rank {rank}") for rank, reply in enumerate(replies) if "error" in reply
        ]
        if errors:
            # A rank that fails takes its peers' connections with it, those of this engine's other ranks among them: report the
            # cause before the consequences.
            causes = [item for item in errors if item[0]["kind"] not in ("DeadlineError", "PeerLostError")]
            own_ranks = {peer_from_plain(error["rank"]) for error, _ in errors if error["rank"]}
            outside = [item for item in errors if not own_ranks & {peer_from_plain(item[0].get("peer", ""))}]
            raise _make_error(*(causes or outside or errors)[0])
        return replies


async def _within_grace(resetting: asyncio.Task[bool]) -> bool:
    try:
        async with asyncio.timeout(_GRACE_S):
            return await resetting
    except TimeoutError:
        hint = "its core hangs; the engine must be restarted"
        phase = "reset of the prefix cache"
        raise DeadlineError(phase=phase, peer="the engine", seconds=_GRACE_S, hint=hint) from None


def _make_error(error: dict[str, Any], where: str) -> PacelineError:
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
