"""The supervisor of the fleet: journals changes, judges silence, and returns the members to work with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from paceline.controller.events import EventHub
from paceline.controller.fleet.membership import Fleet, FleetChange, Health, Member
from paceline.controller.journal import Journal
from paceline.core.errors import DeadlineError, PeerLostError
from paceline.core.members import READY_STATES, RECEIVABLE_STATES, LearnerState, MemberKind, RewardState

_SWEEP_S = 0.5


class Supervisor:
    """Owns the fleet of a run.

    A dead learner ends the run. A run without reward or rollout members ends when one is next required.
    """

    def __init__(self, fleet: Fleet, journal: Journal, events: EventHub) -> None:
        self.fleet = fleet
        self._journal, self._events = journal, events
        self._changed = asyncio.Condition()
        self._announced: set[tuple[str, str]] = set()

    async def apply(self, changes: Sequence[FleetChange]) -> None:
        """Journals changes, announces those that matter to people, and wakes the tasks that wait for one."""
        if not changes:
            return
        self._journal.record_all(
            {
                "event": "member",
                "member": change.member.member_id,
                "incarnation": change.member.incarnation,
                "what": change.what,
                "reason": change.reason,
            }
            for change in changes
        )
        for change in changes:
            self._announce(change)
        async with self._changed:
            self._changed.notify_all()

    def _announce(self, change: FleetChange) -> None:
        """Announces that members come and go, and once per incarnation that it is ready for work."""
        member, what = change.member, change.what
        if change.state in READY_STATES:
            key = (member.member_id, member.incarnation)
            if key in self._announced:
                return
            self._announced.add(key)
            what = "ready"
        elif change.state is not None:
            return
        self._events.notice(f"{member.member_id} is {what}{f': {change.reason}' if change.reason else ''}")

    async def supervise(self) -> None:
        """Looks for silent members until cancelled; raises PeerLostError when the learner is dead."""
        while True:
            await self.apply(self.fleet.sweep())
            for member in self.fleet.members(MemberKind.LEARNER):
                if member.health is Health.DEAD:
                    raise PeerLostError(
                        f"the learner ({member.member_id}) is lost: {member.failure}; see its log, then "
                        "start the same command again: it goes on from the newest checkpoint",
                        peer=member.member_id,
                    )
            await asyncio.sleep(_SWEEP_S)

    async def expel(self, member: Member, reason: str) -> None:
        """Removes a member from the fleet for good."""
        await self.apply(self.fleet.mark_dead(member, reason))

    # --- members

    @property
    def learner(self) -> Member:
        """The learner; raises PeerLostError where it is gone."""
        return self.require(MemberKind.LEARNER)[0]

    @property
    def rollouts(self) -> list[Member]:
        """The rollout servers that can take part in a push.

        A suspect server is left out while there are others; if it comes back, it is a newcomer without
        weights. The last server is tried even if it is suspect: on an overloaded machine, silence does not
        mean death.
        """
        ready = [m for m in self.fleet.usable(MemberKind.ROLLOUT) if m.state in RECEIVABLE_STATES]
        return [m for m in ready if m.health is Health.ALIVE] or ready

    def require(self, kind: MemberKind) -> list[Member]:
        """The usable members of a kind; raises PeerLostError, with the last failure, where none is left."""
        members = self.fleet.usable(kind)
        if not members:
            gone = "; ".join(
                f"{m.member_id}: {m.failure or m.health.value}" for m in self.fleet.members(kind)
            )
            raise PeerLostError(
                f"no {kind.value} service is left ({gone or 'none ever registered'}); see its log, "
                "then start the same command again: it goes on from the newest checkpoint",
                peer=kind.value,
            )
        return members

    # --- waiting

    async def gone(self, member: Member) -> None:
        """Returns when a member is dead or has left."""
        async with self._changed:
            await self._changed.wait_for(lambda: not member.usable)

    async def all_gone(self, *, timeout_s: float) -> None:
        """Waits until every member has left or died, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: not any(m.usable for m in self.fleet.members()))

    async def all_ready(self, *, num_rollouts: int, step: int, timeout_s: float) -> None:
        """Waits for the learner, a reward service and `num_rollouts` servers; announces what is missing.

        Raises:
            PeerLostError: a member died while others were still missing.
            DeadlineError: something is missing after `timeout_s`; names it.
        """

        def ready() -> bool:
            missing = self._missing(num_rollouts)
            dead = [m for m in self.fleet.members() if not m.usable]
            if dead and missing:
                reasons = "; ".join(f"{m.member_id}: {m.failure or m.health.value}" for m in dead)
                raise PeerLostError(f"{reasons} (while starting; see its log)", peer=dead[0].member_id)
            if missing:
                self._events.phase(step=step, phase=f"waiting for {' and '.join(missing)}")
            return not missing

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(ready)
        except TimeoutError:
            raise DeadlineError(
                phase="FORMING",
                peer=" and ".join(self._missing(num_rollouts)),
                seconds=timeout_s,
                hint="see their logs, or raise service.startup_timeout_s",
            ) from None

    def _missing(self, num_rollouts: int) -> list[str]:
        missing = []
        if not any(m.state is LearnerState.READY for m in self.fleet.usable(MemberKind.LEARNER)):
            missing.append("the learner")
        if not any(m.state is RewardState.SERVING for m in self.fleet.usable(MemberKind.REWARD)):
            missing.append("the reward service")
        short = num_rollouts - len(self.rollouts)
        return missing + ([f"{short} rollout server(s)"] if short > 0 else [])
