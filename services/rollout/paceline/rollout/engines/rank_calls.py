"""The calls that an engine makes on each of its ranks; mixed into the engine's own worker.

A rank answers with a dict of plain values, also for an error. An exception would leave other ranks waiting,
or their replies in queues where the next call reads them as its own. It would also lose which peer was at
fault.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from paceline.core.errors import DeadlineError, PeerLostError
from paceline.core.members import peer_to_plain
from paceline.rollout.engines.answers import Reply
from paceline.rollout.engines.rank_receiver import RankReceiver
from paceline.weights.plan.spec import WeightGroupSpec

logger = logging.getLogger(__name__)


class RankCalls:
    """Paceline's methods of a worker; their prefix separates them from the worker's own."""

    # Not set in an __init__, because an engine may call none of a class that it mixes in.
    _paceline_state: RankReceiver | None = None

    def paceline_call(self, method: str, args: Sequence[Any]) -> Reply:
        """Calls a method of this rank; returns its reply, or its error as a value."""
        try:
            reply: Reply = getattr(self, method)(*args)
        except Exception as error:  # errors travel to the caller as values
            logger.warning("%s failed", method, exc_info=True)
            rank = self._paceline_state.rank_ref if self._paceline_state is not None else None
            return {"error": _described(error) | {"rank": rank and peer_to_plain(rank)}}
        return reply

    def paceline_describe(self) -> Reply:
        """Returns the layout of this rank, as bytes."""
        return {"layout": self._paceline_receiver().describe().to_bytes()}

    def paceline_join(self, spec: bytes, rank_offset: int, timeout_s: float) -> Reply:
        """Joins the weight group; `rank_offset` is the group rank of this server's first TP rank."""
        group = WeightGroupSpec.from_bytes(spec)
        self._paceline_receiver().join(group, rank_offset + self._paceline_rank(), timeout_s)
        return {}

    def paceline_digest(self, version: int) -> Reply:
        """Computes digests of the parameters; `version` only labels the report."""
        report = self._paceline_receiver().digest(version, f"TP rank {self._paceline_rank()}")
        return {"digests": report.to_bytes()}

    def paceline_leave(self) -> Reply:
        """Leaves the group; peers that still wait get an error."""
        self._paceline_receiver().leave()
        return {}

    def _paceline_receiver(self) -> RankReceiver:
        if self._paceline_state is None:
            self._paceline_state = self._paceline_new_receiver()
        return self._paceline_state

    def _paceline_new_receiver(self) -> RankReceiver:
        raise NotImplementedError

    def _paceline_rank(self) -> int:
        raise NotImplementedError


def _described(error: Exception) -> Reply:
    reply: Reply = {"kind": type(error).__name__, "message": str(error)}
    if isinstance(error, DeadlineError):
        reply |= {"phase": error.phase, "seconds": error.seconds, "hint": error.hint}
    if isinstance(error, DeadlineError | PeerLostError):
        reply["peer"] = peer_to_plain(error.peer)
    return reply
