"""The errors of an engine's calls: what its ranks report, an answer that does not come, the engine's end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from paceline.core.errors import DeadlineError, ModelError, PacelineError, PeerLostError, WeightSyncError
from paceline.core.members import LocalPart, RankRef, peer_from_plain

Reply = dict[str, Any]

GRACE_S: Final = 10.0
"""Extra seconds that an engine may take to answer, beyond the deadline of its ranks."""


def raise_reported(replies: Sequence[Reply]) -> None:
    """Raises the error in `replies`, by rank; of several errors, the one that caused the others."""
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


def no_answer(phase: str, seconds: float) -> DeadlineError:
    """Returns the error for an engine that has not answered in time."""
    hint = "its processes hang; the engine must be restarted"
    return DeadlineError(phase=phase, peer=LocalPart.ENGINE, seconds=seconds, hint=hint)


def engine_died(cause: str = "", codes: Sequence[int] = ()) -> PeerLostError:
    """Returns the error for a dead engine, with what is known of the end of its processes."""
    ended = f" (exit codes {codes})" if codes else ""
    why = cause or "its last lines are in the log of this server"
    return PeerLostError(f"the inference engine has died{ended}: {why}", peer=LocalPart.ENGINE)


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
