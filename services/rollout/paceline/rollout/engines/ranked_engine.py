"""The parts that engines share: calls that all ranks answer, and what makes an engine unusable."""

from __future__ import annotations

import abc
import time
from collections.abc import Sequence
from typing import Any

from paceline.core.errors import DeadlineError, PeerLostError, WeightSyncError
from paceline.core.members import EnginePart, LocalPart
from paceline.rollout.engines.answers import Reply, raise_reported
from paceline.rollout.engines.base import Engine
from paceline.rollout.engines.processes import EngineProcesses
from paceline.weights.digest.agreement import DigestReport
from paceline.weights.geometry.layout import RankLayout
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.receipt import PushReceipt

DESCRIBE_S = 60.0
_LEAVE_S = 30.0


class RankedEngine(Engine, abc.ABC):
    """An engine whose ranks answer calls by name. Each method's promise is in `engines/base.py`."""

    def __init__(self, processes: EngineProcesses) -> None:
        self._processes = processes
        self._unusable: PeerLostError | None = None
        self._asleep: set[EnginePart] = set()
        self._is_paused = False
        self._freed_bytes = 0

    @abc.abstractmethod
    async def _answers(self, method: str, args: tuple[Any, ...], timeout_s: float) -> list[Reply]:
        """Calls a method on every rank; returns the replies by rank, errors among them."""

    def _give_up(self, error: PeerLostError) -> PeerLostError:
        """Notes that the engine is of no more use; returns the error."""
        self._unusable = error
        return error

    async def call_workers(self, method: str, args: tuple[Any, ...], timeout_s: float) -> list[Reply]:
        """Calls a method on every rank; returns the replies by rank.

        An engine that does not answer, or whose loader is broken, is of no more use: `check_health` says so.

        Raises:
            DeadlineError, PeerLostError: the engine hangs or died; or a rank reports that a peer did.
            ModelError, WeightSyncError: as a rank reports.
        """
        try:
            replies = await self._answers(method, args, timeout_s)
            raise_reported(replies)
            return replies
        except (DeadlineError, PeerLostError) as error:
            if error.peer is LocalPart.ENGINE:
                self._give_up(PeerLostError(str(error), peer=LocalPart.ENGINE))
            raise

    async def describe(self) -> tuple[RankLayout, ...]:
        """Returns which part of which checkpoint tensor each rank needs, by rank."""
        replies = await self.call_workers("paceline_describe", (), DESCRIBE_S)
        return tuple(RankLayout.from_bytes(reply["layout"]) for reply in replies)

    async def join(self, spec: WeightGroupSpec, rank_offset: int, timeout_s: float) -> None:
        """Makes all ranks join the group, rank 0 as group rank `rank_offset`."""
        await self.call_workers("paceline_join", (spec.to_bytes(), rank_offset, timeout_s), timeout_s)

    async def digest(self, version: int) -> tuple[DigestReport, ...]:
        """Returns the digest of the live parameters, one report per rank."""
        replies = await self.call_workers("paceline_digest", (version,), DESCRIBE_S)
        return tuple(DigestReport.from_bytes(reply["digests"]) for reply in replies)

    async def leave(self) -> None:
        """Makes all ranks leave the group."""
        await self.call_workers("paceline_leave", (), _LEAVE_S)

    def _check_running(self) -> None:
        """Raises PeerLostError if one of the engine's processes is stopped."""
        if stopped := self._processes.stopped(time.monotonic()):
            raise self._give_up(
                PeerLostError(
                    f"process {stopped} of the inference engine is stopped, as by SIGSTOP, and nobody "
                    "continues it; the engine must be restarted",
                    peer=LocalPart.ENGINE,
                )
            )


def merged_receipt(replies: Sequence[Reply]) -> PushReceipt:
    """Returns the receipt of all ranks."""
    return PushReceipt.merge([PushReceipt.from_bytes(reply["receipt"]) for reply in replies])


def mixed_versions(version: int) -> WeightSyncError:
    """Makes the error of a push during requests."""
    return WeightSyncError(
        f"version {version} arrived while requests were running: they would mix it with cached keys and "
        "values of the old weights. Abort them before a push"
    )
