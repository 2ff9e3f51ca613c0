"""The supervisor of the fleet: journals changes, judges silence, and returns the members to work with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

from paceline.controller.events import EventHub
from paceline.controller.fleet.departures import Departures
from paceline.controller.fleet.membership import SWEEP_S, Fleet, FleetChange, Health, Member
from paceline.controller.fleet.meter import FleetMeter
from paceline.controller.fleet.quarantine import Quarantine
from paceline.controller.fleet.usage import FleetUsage
from paceline.controller.journal import Journal
from paceline.core.clock import Clock
from paceline.core.errors import ConfigError, DeadlineError, PeerLostError, WeightSyncError
from paceline.core.members import (
    READY_STATES,
    RECEIVABLE_STATES,
    LearnerState,
    MemberKind,
    RewardState,
    RolloutState,
)
from paceline.service.observability.usage import UsageSampler


class Supervisor:
    """Owns the fleet of a run.

    A member that is lost does not end the run: whoever needs it waits until it is back (`learner_ready`,
    `rollouts_ready`, `reward_ready`). The run ends if it does not come in time, or if its failure is final.
    """

    def __init__(self, fleet: Fleet, journal: Journal, events: EventHub, clock: Clock) -> None:
        self.fleet = fleet
        self._quarantine, self._meter = Quarantine(clock), FleetMeter(clock)
        self.departures = Departures(fleet, clock)
        self.usage = FleetUsage(clock, UsageSampler(uses_gpus=False).sample)
        self._journal, self._events = journal, events
        self._changed = asyncio.Condition()
        self._awaited_ends: dict[asyncio.Future[None], Member] = {}
        self._announced: set[tuple[str, str]] = set()
        self._has_served = False

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
                **(
                    {"engine": change.member.engine}
                    if change.what == "registered" and change.member.engine
                    else {}
                ),
            }
            for change in changes
        )
        for change in changes:
            self._meter.note(change)
            self._announce(change)
            if change.state is RolloutState.SERVING:
                self._has_served = True
                self._quarantine.succeeded(change.member.member_id)
        await self._wake()

    def usage_metrics(self) -> dict[str, float]:
        """Returns metrics of the members' use of their machines since the last call."""
        return self.usage.metrics([member.member_id for member in self.fleet.members() if member.usable])

    async def _wake(self) -> None:
        for end, member in self._awaited_ends.items():
            if not member.usable and not end.done():
                end.set_result(None)
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
        verb = "has" if what == "left" else "is"
        reason = f": {change.reason}" if change.reason else ""
        self._events.notice(f"{member.member_id} {verb} {what}{reason}")

    async def supervise(self) -> None:
        """Looks for silent members, and lets members out of quarantine, until cancelled."""
        while True:
            await self.apply(self.fleet.sweep())
            for member_id in self._quarantine.release():
                self._events.notice(f"{member_id} is out of quarantine: the next push tries it again")
                await self._wake()
            await asyncio.sleep(SWEEP_S)

    async def expel(self, member: Member, reason: str) -> None:
        """Removes a member from the fleet for good, because a join or a push to it failed.

        After three of these in a row the next incarnations stay in quarantine for a while.
        """
        await self.apply(self.fleet.mark_dead(member, reason))
        seconds = self._quarantine.failed(member.member_id, reason)
        if seconds:
            failures = self._quarantine.failures(member.member_id)
            self._events.notice(
                f"{member.member_id} failed {failures} pushes in a row: it gets no weights for {seconds:g} s "
                f"(last: {reason})"
            )

    def drain(self, member_id: str) -> None:
        """Tells a rollout or reward member to finish its work and leave.

        Raises:
            ConfigError: there is no such member, it is the learner, or it is the last of its kind.
        """
        workers = [m for m in self.fleet.members() if m.usable and m.kind is not MemberKind.LEARNER]
        member = next((m for m in workers if m.member_id == member_id), None)
        if member is None:
            names = ", ".join(m.member_id for m in workers) or "none"
            raise ConfigError(f"no member {member_id} can be drained; those that can: {names}")
        others = [m for m in workers if m.kind is member.kind and m is not member and m.stays]
        if not any(not m.validates for m in others) and not member.validates:
            raise ConfigError(
                f"{member_id} is the last {member.kind.value} member, and the run would wait for another: "
                "start that one first"
            )
        member.is_draining = True
        self._events.notice(f"{member_id} is told to finish its work and leave")

    # --- members

    @property
    def learner(self) -> Member:
        """The learner; raises PeerLostError, with its last failure, if it is gone."""
        members = self.fleet.usable(MemberKind.LEARNER)
        if not members:
            gone = _failures(self.fleet.members(MemberKind.LEARNER)) or "none ever registered"
            raise PeerLostError(f"no learner is left ({gone})", peer=MemberKind.LEARNER.value)
        return members[0]

    @property
    def rollouts(self) -> list[Member]:
        """The rollout servers that answer training prompts and can take part in a push.

        A suspect server is left out while there are others; if it comes back, it is a newcomer without
        weights. The last server is tried even if it is suspect: on an overloaded machine, silence does not
        mean death.

        Servers in quarantine are left out even if there are no others: a push that fails each time would be
        repeated without end. The run then waits for the quarantine to end.
        """
        return self._receivers(validates=False)

    @property
    def validators(self) -> list[Member]:
        """The validation servers that can take part in a push."""
        return self._receivers(validates=True)

    def _receivers(self, *, validates: bool) -> list[Member]:
        ready = [
            m
            for m in self.fleet.usable(MemberKind.ROLLOUT)
            if m.validates is validates
            and m.state in RECEIVABLE_STATES
            and not self._quarantine.holds(m.member_id)
        ]
        return [m for m in ready if m.health is Health.ALIVE] or ready

    # --- waiting

    async def gone(self, member: Member) -> None:
        """Returns when a member is dead or has left."""
        if not member.usable:
            return
        # A push waits for the end of every member while it calls them: waking all of these tasks at every
        # change would grow with the square of the members.
        end = asyncio.get_running_loop().create_future()
        self._awaited_ends[end] = member
        try:
            await end
        finally:
            del self._awaited_ends[end]

    async def all_gone(self, members: Callable[[], Sequence[Member]], *, timeout_s: float) -> None:
        """Waits until each of `members` has left or died, for at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: not any(m.usable for m in members()))

    async def all_ready(
        self, *, num_rollouts: int, step: int, timeout_s: float, num_validators: int = 0
    ) -> None:
        """Waits for the learner, a reward service and this many servers; announces what is missing.

        Args:
            num_rollouts: servers that answer training prompts.

        Raises:
            PeerLostError: a member's failure is final while others are still missing.
            DeadlineError: something is missing after `timeout_s`; names it.
        """

        def missing() -> list[str]:
            names = [*self._no_learner(), *self._no_reward(), *self._no_rollouts(num_rollouts)]
            if (short := num_validators - len(self.validators)) > 0:
                names.append(f"{short} validation server(s), which are started with --validates")
            if names:
                self._events.phase(step=step, phase=f"waiting for {' and '.join(names)}")
            return names

        await self._wait(missing, tuple(MemberKind), timeout_s, setting="service.startup_timeout_s")

    async def still_busy(
        self, kind: MemberKind, is_busy: Callable[[Member], bool], timeout_s: float
    ) -> list[Member]:
        """Waits until no usable member of a kind is busy; returns those that still are after `timeout_s`."""

        def busy() -> list[Member]:
            return [member for member in self.fleet.usable(kind) if is_busy(member)]

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: not busy())
        return busy()

    async def learner_ready(self, timeout_s: float) -> Member:
        """Waits until there is a learner that has loaded its weights, for at most `timeout_s`.

        Raises:
            PeerLostError: the learner's failure is final.
            DeadlineError: there is no learner after `timeout_s`; says why the last one is gone.
        """
        await self._wait_for_return(self._no_learner, MemberKind.LEARNER, timeout_s)
        return self.learner

    async def rollouts_ready(self, timeout_s: float) -> list[Member]:
        """Waits until a rollout server can take part in a push; returns all that can. Errors as above.

        Raises:
            WeightSyncError: no server has ever served, and each has refused three pushes in the same words.
        """
        await self._wait_for_return(lambda: self._no_rollouts(1), MemberKind.ROLLOUT, timeout_s)
        return self.rollouts

    async def reward_ready(self, timeout_s: float) -> None:
        """Waits until a reward service serves. Errors as above."""
        await self._wait_for_return(self._no_reward, MemberKind.REWARD, timeout_s)

    async def _wait_for_return(
        self, missing: Callable[[], list[str]], kind: MemberKind, timeout_s: float
    ) -> None:
        names = missing()
        if names:
            gone = _failures(self.fleet.members(kind))
            self._events.notice(f"waiting up to {timeout_s:g} s for {names[0]}{f' ({gone})' if gone else ''}")
            await self._wait(missing, (kind,), timeout_s, setting="service.recovery_timeout_s")

    async def _wait(
        self, missing: Callable[[], list[str]], kinds: Sequence[MemberKind], timeout_s: float, *, setting: str
    ) -> None:
        def complete() -> bool:
            names = missing()
            final = [m for m in self.fleet.members() if m.kind in kinds and m.is_final and not m.usable]
            if names and final:
                raise PeerLostError(f"{_failures(final)} (see its log)", peer=final[0].member_id)
            if names and MemberKind.ROLLOUT in kinds and (refusals := self._refusals()):
                raise WeightSyncError(
                    f"no rollout server takes weights; each refused three pushes: {refusals}"
                )
            return not names

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(complete)
        except TimeoutError:
            gone = _failures(m for kind in kinds for m in self.fleet.members(kind))
            raise DeadlineError(
                phase="FORMING",
                peer=" and ".join(missing()),
                seconds=timeout_s,
                hint=f"{f'last failures: {gone}; ' if gone else ''}see the logs, or raise {setting}",
            ) from None

    def _refusals(self) -> str:
        """Returns why all servers refuse weights for good; "" if one may take them, or has taken them."""
        reasons = {
            m.member_id: self._quarantine.refusal(m.member_id) for m in self.fleet.members(MemberKind.ROLLOUT)
        }
        if self._has_served or not all(reasons.values()):
            return ""
        return "; ".join(f"{member_id}: {reason}" for member_id, reason in reasons.items())

    def _no_learner(self) -> list[str]:
        states = [m.state for m in self.fleet.usable(MemberKind.LEARNER)]
        return [] if any(state not in (None, LearnerState.LOADING) for state in states) else ["the learner"]

    def _no_reward(self) -> list[str]:
        members = self.fleet.usable(MemberKind.REWARD)
        return [] if any(m.state is RewardState.SERVING for m in members) else ["the reward service"]

    def _no_rollouts(self, num_wanted: int) -> list[str]:
        short = num_wanted - len(self.rollouts)
        return [f"{short} rollout server(s)"] if short > 0 else []


def _failures(members: Iterable[Member]) -> str:
    """Says why members are gone, as a sentence; "" if none is."""
    return "; ".join(f"{m.member_id}: {m.failure or m.health.value}" for m in members if not m.usable)
