"""Departures: which members that were told to end are still needed by the step in progress.

A stack that is shut down stops its members together, and often before the controller. Members that the step
needs stay until it is finished and saved; the others leave soon, and those that stay take over their prompts.
"""

from __future__ import annotations

from paceline.controller.fleet.membership import Fleet, Member
from paceline.core.clock import Clock
from paceline.core.members import MemberKind

# Members that are told together ask within this time; none is let go before, since the others may be leaving
# too.
_TOGETHER_S = 3.0


class Departures:
    """Answers members that ask whether they may end."""

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self._fleet, self._clock = fleet, clock
        self._asked_at: dict[tuple[str, str], float] = {}
        self._released: set[tuple[str, str]] = set()
        self._is_over = False

    def holds(self, member: Member) -> bool:
        """Notes that a member's process was told to end; returns whether the member must stay for now."""
        asked_at = self._asked_at.setdefault(_key(member), self._clock.monotonic())
        if self._is_over or member.is_starting or _key(member) in self._released:
            return False
        if member.kind is MemberKind.LEARNER and self._nobody_is_left():
            return False
        return self._is_needed(member) or self._clock.monotonic() - asked_at < _TOGETHER_S

    @property
    def waiting(self) -> list[Member]:
        """Members that asked to leave and that the step needs; they may go when it is finished and saved."""
        waiting = (m for m in self.asked() if _key(m) not in self._released)
        return [m for m in waiting if not m.is_starting and self._is_needed(m)]

    def asked(self, kind: MemberKind | None = None) -> list[Member]:
        """Members, of a kind or all, that were told to end and have not left."""
        return [m for m in self._fleet.members(kind) if m.usable and _key(m) in self._asked_at]

    def release(self) -> list[Member]:
        """Lets all `waiting` members go; returns them."""
        leaving = self.waiting
        self._released.update(map(_key, leaving))
        return leaving

    def end(self) -> None:
        """Lets all members go, also those that ask later, because this controller ends."""
        self._is_over = True

    def _nobody_is_left(self) -> bool:
        """Returns whether all servers or all reward services have ended, so that no step can be finished."""
        for kind in (MemberKind.ROLLOUT, MemberKind.REWARD):
            members = [member for member in self._fleet.members(kind) if not member.validates]
            was_told = any(_key(member) in self._asked_at for member in members)
            if was_told and not any(member.usable for member in members):
                return True
        return False

    def _is_needed(self, member: Member) -> bool:
        """Returns whether the step can only be finished and saved with this member."""
        if member.kind is MemberKind.LEARNER or self.asked(MemberKind.LEARNER):
            return True
        if member.validates:
            # If it leaves, its prompts go to others.
            return False
        others = (m for m in self._fleet.usable(member.kind) if m is not member and not m.validates)
        return not any(m.stays and not m.is_starting and _key(m) not in self._asked_at for m in others)


def _key(member: Member) -> tuple[str, str]:
    return member.member_id, member.incarnation
