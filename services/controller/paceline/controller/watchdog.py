"""The watchdog: when a phase makes no progress, it says which members the phase waits for, and how long.

It ends nothing; deadlines do. A phase has made no progress while step, phase and the count of admitted
trajectories stay the same. The first notice comes after 30 s, or after twice the longest time that this phase
has taken before, so that phases that always take minutes are not reported; then one comes every minute.
"""

from __future__ import annotations

import asyncio
import logging

from paceline.controller.events import EventHub
from paceline.controller.fleet.membership import Fleet, Member
from paceline.controller.phases import Phase
from paceline.controller.progress import Progress
from paceline.core.clock import Clock
from paceline.core.members import READY_STATES, MemberKind

log = logging.getLogger(__name__)

_FIRST_NOTICE_S, _NEXT_NOTICE_S = 30.0, 60.0
_LOOK_S = 1.0
_MAX_NAMED = 6

_ALL = (MemberKind.LEARNER, MemberKind.ROLLOUT, MemberKind.REWARD)
_WAITS_FOR: dict[Phase, tuple[MemberKind, ...]] = {
    Phase.STARTING: _ALL,
    Phase.FORMING: _ALL,
    Phase.DISPATCH: (),
    Phase.COLLECT: (MemberKind.ROLLOUT, MemberKind.REWARD),
    Phase.VALIDATE: (MemberKind.ROLLOUT, MemberKind.REWARD),
    Phase.LEARN: (MemberKind.LEARNER,),
    Phase.ROLLBACK: (MemberKind.LEARNER,),
    Phase.CHECKPOINT: (MemberKind.LEARNER,),
    Phase.PUBLISH: (MemberKind.LEARNER, MemberKind.ROLLOUT),
    Phase.COMMIT: (MemberKind.ROLLOUT,),
}


class Watchdog:
    """Looks at the progress of a run about once a second."""

    def __init__(self, progress: Progress, fleet: Fleet, events: EventHub, clock: Clock) -> None:
        self._progress, self._fleet, self._events, self._clock = progress, fleet, events, clock
        self._mark = self._look_at_progress()
        self._since, self._notice_after_s = clock.monotonic(), _FIRST_NOTICE_S
        self._longest_s: dict[Phase, float] = {}

    async def run(self) -> None:
        """Announces what a stalled phase waits for, until cancelled."""
        while True:
            sentence = self.look()
            if sentence is not None:
                log.warning("%s", sentence)
                self._events.notice(sentence)
            await asyncio.sleep(_LOOK_S)

    def look(self) -> str | None:
        """Returns a notice if one is due."""
        now, mark = self._clock.monotonic(), self._look_at_progress()
        seconds = now - self._since
        if mark != self._mark:
            phase = self._mark[1]
            self._longest_s[phase] = max(seconds, self._longest_s.get(phase, 0.0))
            self._mark, self._since = mark, now
            self._notice_after_s = max(_FIRST_NOTICE_S, 2 * self._longest_s.get(mark[1], 0.0))
            return None
        if seconds < self._notice_after_s or mark[1] not in _WAITS_FOR:
            return None
        self._notice_after_s = seconds + _NEXT_NOTICE_S
        return self._sentence(seconds, now)

    def _look_at_progress(self) -> tuple[int, Phase, int]:
        progress = self._progress
        return progress.step, progress.phase, progress.admitted

    def _sentence(self, seconds: float, now: float) -> str:
        step, phase, admitted = self._mark
        wanted = self._progress.wanted
        count = f" at {admitted} of {wanted} trajectories" if wanted else ""
        members = [m for kind in _WAITS_FOR[phase] for m in self._fleet.members(kind)]
        absent: list[str] = []
        if phase is Phase.FORMING:
            # A push waits for members that are not ready, and for at least one of each kind.
            absent = [f"{kind.value} (none registered)" for kind in _ALL if not self._fleet.members(kind)]
            not_ready = [m for m in members if not m.usable or m.state not in READY_STATES]
            members = not_ready if not_ready or absent else members
        named = absent + [_words(m, now) for m in members[:_MAX_NAMED]]
        whom = ", ".join(named) or "the message broker"
        more = f" and {len(members) - _MAX_NAMED} more" if len(members) > _MAX_NAMED else ""
        return (
            f"step {step}: {phase.value}{count} for {seconds:.0f} s without progress; waits for {whom}{more}"
        )


def _words(member: Member, now: float) -> str:
    if not member.usable:
        return f"{member.member_id} ({member.health.value}: {member.failure})"
    state = member.state.value if member.state else "registered"
    work = f", {member.in_flight} under way" if member.in_flight else ""
    return f"{member.member_id} ({state}{work}, heard {now - member.last_heard:.0f} s ago)"
