"""The fleet as an actor: changes go to the journal, to watchers of the run, and to whoever waits for a state of the fleet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from paceline.controller.events import EventHub
from paceline.controller.fleet.membership import Fleet, FleetChange, Health, Member
from paceline.controller.journal import Journal
from paceline.core.errors import DeadlineError, PeerLostError
from paceline.core.members import READY_STATES, MemberKind

_SWEEP_S = 0.5


class FleetWatch:
    """Judges silence, and lets others wait.

    A dead learner ends the run; so does the last reward or rollout member, once whoever needs one asks for it by `require`.
    """

    def __init__(self, fleet: Fleet, journal: Journal, hub: EventHub) -> None:
        self.fleet = fleet
        self._journal, self._hub = journal, hub
        self._changed = asyncio.Condition()
        self._ready: set[tuple[str, str]] = set()

    async def apply(self, changes: Sequence[FleetChange]) -> None:
        """Journals changes, tells watchers what matters to people, wakes who waits."""
        if not changes:
            return
        await self._journal.record_all(
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
            self._tell(change)
        async with self._changed:
            self._changed.notify_all()

    def _tell(self, change: FleetChange) -> None:
        """People hear of comings and goings, and once of every incarnation that it is ready for work."""
        member, what = change.member, change.what
        if change.state in READY_STATES:
            key = (member.member_id, member.incarnation)
            if key in self._ready:
                return
            self._ready.add(key)
            what = "ready"
        elif change.state is not None:
            return
        self._hub.notice(f"{member.member_id} is {what}{f': {change.reason}' if change.reason else ''}")

    async def all_gone(self, *, timeout_s: float) -> None:
        """Waits until every member has left or died, at most `timeout_s`: who is slow is the supervisor's affair."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: not any(m.usable for m in self.fleet.members()))

    async def expel(self, member: Member, reason: str) -> None:
        """Puts a member out of the fleet for good."""
        await self.apply(self.fleet.mark_dead(member, reason))

    async def gone(self, member: Member) -> None:
        """Returns when a member is dead or has left."""
        async with self._changed:
            await self._changed.wait_for(lambda: not member.usable)

    async def watch(self) -> None:
        """Sweeps for ever; raises PeerLostError when the learner dies."""
        while True:
            await self.apply(self.fleet.sweep())
            for member in self.fleet.members(MemberKind.LEARNER):
                if member.health is Health.DEAD:
                    raise PeerLostError(
                        f"the learner ({member.member_id}) is lost: {member.failure}; see its log, then start the same command again: it goes on "
                        "from the newest checkpoint",
                        peer=member.member_id,
                    )
            await asyncio.sleep(_SWEEP_S)

    def require(self, kind: MemberKind) -> list[Member]:
        """Usable members of a kind; raises PeerLostError, with the last failure, where none is left."""
        members = self.fleet.usable(kind)
        if not members:
            gone = [f"{m.member_id}: {m.failure or m.health.value}" for m in self.fleet.members(kind)]
            raise PeerLostError(
                f"no {kind.value} service is left ({'; '.join(gone) or 'none ever registered'}); see its log, then start the same command "
                "again: it goes on from the newest checkpoint",
                peer=kind.value,
            )
        return members

    async def wait_for(
        self, ready: Callable[[], bool], *, timeout_s: float, phase: str, missing: Callable[[], str]
    ) -> None:
        """Waits until `ready()`; raises DeadlineError, naming `missing()`, after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(ready)
        except TimeoutError:
            raise DeadlineError(
                phase=phase,
                peer=missing(),
                seconds=timeout_s,
                hint="see their logs, or raise service.startup_timeout_s",
            ) from None
