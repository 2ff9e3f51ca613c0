"""Decides which rollout servers are at fault when a join or a push fails.

A member that gives up cuts all of its connections, so one failure spreads to members that did nothing wrong.
Their errors name the member or rank that they lost (`PeerLostError.peer`, `DeadlineError.peer`). An error is
the member's own if it names no other member, or only a part of the member itself (`LocalPart`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.controller.fleet.membership import Member
from paceline.core.errors import DeadlineError, PacelineError, PeerLostError
from paceline.core.members import LocalPart, MemberKind, Peer, RankRef

Failure = tuple[Member, PacelineError]
"""A rollout server and the error of the call to it."""


def is_own_failure(member: Member, error: BaseException) -> bool:
    """Returns whether an error of a call to `member` is its own, and not the consequence of another member's
    error."""
    peer = _peer(error)
    if isinstance(peer, RankRef):
        return peer.kind is member.kind is MemberKind.LEARNER
    return peer in (None, member.member_id) or isinstance(peer, LocalPart)


def at_fault(
    failures: Sequence[Failure], learner_error: BaseException | None, owners: Sequence[Member]
) -> list[Failure]:
    """Returns the failures of the servers that must be expelled.

    These are the servers that failed by themselves. If no server did, the result is the one failed server to
    which the others' errors lead, or empty if they lead to none.

    Args:
        failures: every rollout server whose call failed.
        learner_error: the error of the learner's call, if that failed, too; the learner itself is not lost.
    """
    own = [(member, error) for member, error in failures if is_own_failure(member, error)]
    if own:
        return own
    accusations = {member.member_id: _accused(error, owners) for member, error in failures}
    first = _accused(learner_error, owners) if learner_error is not None else None
    last = _last_accused(accusations, first)
    return [(member, error) for member, error in failures if member.member_id == last]


def _peer(error: BaseException) -> Peer | None:
    """Returns the peer that an error names; None if the error names none."""
    return error.peer if isinstance(error, PeerLostError | DeadlineError) else None


def _accused(error: BaseException, owners: Sequence[Member]) -> str | None:
    """Returns the id of the server whose rank an error names, if it names a rollout rank."""
    peer = _peer(error)
    if not isinstance(peer, RankRef) or peer.kind is not MemberKind.ROLLOUT or peer.number is None:
        return None
    return owners[peer.number].member_id if peer.number < len(owners) else None


def _last_accused(accusations: Mapping[str, str | None], first: str | None) -> str | None:
    """Follows the accusations to their end, from `first` or else from the first that any server makes.

    A server that passes weights on gives up when it loses a peer, so the first accused may only be a victim.
    """
    accused = first or next((other for other in accusations.values() if other is not None), None)
    seen: set[str] = set()
    while accused is not None and accused in accusations and accused not in seen:
        seen.add(accused)
        accused = accusations[accused] or accused
    return accused
