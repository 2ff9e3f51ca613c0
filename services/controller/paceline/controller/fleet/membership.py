"""The fleet: which members are registered, silent or dead. Pure: the caller passes the time.

Silence counts only while this process runs: if this process was paused, no member is declared dead because it
was not heard during the pause.

A DEAD or LEFT member never comes back: no transition leads out of these states. A restarted process registers
a new incarnation and starts from the beginning; only a completed push gives it weights.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass

from paceline.core.clock import Clock
from paceline.core.errors import IllegalTransitionError
from paceline.core.members import STARTING_STATES, MemberKind, MemberState, RewardState, RolloutState
from paceline.core.policy import PolicyTag

SWEEP_S = 0.5
"""How often silence is judged."""
START_PATIENCE = 5.0
"""How many times as long a member may be silent while it starts: large libraries block its heartbeats."""


class Health(enum.Enum):
    """How the controller sees a member."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


_MOVES = {
    Health.ALIVE: {Health.ALIVE, Health.SUSPECT, Health.DEAD, Health.LEFT},
    Health.SUSPECT: {Health.ALIVE, Health.SUSPECT, Health.DEAD, Health.LEFT},
    Health.DEAD: {Health.DEAD},
    Health.LEFT: {Health.LEFT},
}


def move(current: Health, to: Health) -> Health:
    """Returns `to` if the move exists; otherwise raises an IllegalTransitionError that names both states."""
    if to not in _MOVES[current]:
        raise IllegalTransitionError(
            f"a {current.value} member cannot become {to.value}; it must register again"
        )
    return to


@dataclass(kw_only=True, slots=True)
class Member:
    """One incarnation of one slot of the fleet.

    Attributes:
        failure: why the member is dead, or has left.
        is_final: whether a restart would fail in the same way, because its inputs are unusable.
        is_draining: whether the member was told to finish its work and leave.
        validates: whether the member is a rollout server that only answers held-out prompts.
        engine: the engine of a rollout server; "" for other members.
    """

    kind: MemberKind
    member_id: str
    incarnation: str
    address: str
    num_ranks: int
    last_heard: float
    health: Health = Health.ALIVE
    state: MemberState | None = None
    policy: PolicyTag | None = None
    in_flight: int = 0
    failure: str = ""
    is_final: bool = False
    is_draining: bool = False
    validates: bool = False
    engine: str = ""

    @property
    def usable(self) -> bool:
        """Whether the member can be called, because it is neither dead nor gone."""
        return self.health in (Health.ALIVE, Health.SUSPECT)

    @property
    def is_starting(self) -> bool:
        """Whether the member is still importing modules and loading its model."""
        return self.state is None or self.state in STARTING_STATES

    @property
    def stays(self) -> bool:
        """Whether the member can be called and is not about to leave."""
        leaving = self.is_draining or self.state in (RolloutState.DRAINING, RewardState.DRAINING)
        return self.usable and not leaving


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetChange:
    """A change of a member, for the journal and for tasks that wait for one."""

    member: Member
    what: str
    reason: str = ""
    state: MemberState | None = None


class Fleet:
    """All members by id; every method returns the changes that it made, oldest first.

    Args:
        suspect_after_s, dead_after_s: silence, in seconds, after which a member is suspected, and dead;
            START_PATIENCE times as long while it starts.
    """

    def __init__(self, clock: Clock, *, suspect_after_s: float, dead_after_s: float) -> None:
        self._clock = clock
        self._suspect_after_s, self._dead_after_s = suspect_after_s, dead_after_s
        self._members: dict[str, Member] = {}
        self._swept: float | None = None

    def members(self, kind: MemberKind | None = None) -> list[Member]:
        """Members by id, in order; of one kind, or all."""
        return [m for _, m in sorted(self._members.items()) if kind is None or m.kind is kind]

    def usable(self, kind: MemberKind) -> list[Member]:
        """Members of a kind that may be called, in order of id."""
        return [m for m in self.members(kind) if m.usable]

    def get(self, member_id: str) -> Member | None:
        """Returns the current incarnation in a slot."""
        return self._members.get(member_id)

    def register(
        self,
        *,
        kind: MemberKind,
        member_id: str,
        incarnation: str,
        address: str,
        num_ranks: int,
        state: MemberState | None = None,
        policy: PolicyTag | None = None,
        validates: bool = False,
        engine: str = "",
    ) -> list[FleetChange]:
        """Adds a member, unless this incarnation is known already; an older incarnation is marked dead.

        `state` and `policy` are those that the member has when it registers: a member that outlived a
        controller may be at work.
        """
        changes: list[FleetChange] = []
        old = self._members.get(member_id)
        if old is not None:
            if old.incarnation == incarnation and old.usable:
                old.last_heard = self._clock.monotonic()
                return []
            if old.usable:
                changes += self.mark_dead(old, "another incarnation took its place")
        member = Member(
            kind=kind,
            member_id=member_id,
            incarnation=incarnation,
            address=address,
            num_ranks=num_ranks,
            last_heard=self._clock.monotonic(),
            validates=validates,
            engine=engine,
        )
        self._members[member_id] = member
        changes.append(FleetChange(member=member, what="registered"))
        if state is not None:
            changes += self.heartbeat(member_id, incarnation, state=state, policy=policy, in_flight=0)[1]
        return changes

    def heartbeat(
        self,
        member_id: str,
        incarnation: str,
        *,
        state: MemberState | None,
        policy: PolicyTag | None,
        in_flight: int,
        failure: str = "",
        is_final: bool = False,
    ) -> tuple[bool, list[FleetChange]]:
        """Notes a heartbeat; (False, []) for a member that is unknown, dead or gone and must register again.

        `state` is None if a member only reports why it fails.
        """
        member = self._members.get(member_id)
        if member is None or member.incarnation != incarnation or not member.usable:
            return False, []
        member.last_heard = self._clock.monotonic()
        changes: list[FleetChange] = []
        if member.health is Health.SUSPECT:
            member.health = move(member.health, Health.ALIVE)
            changes.append(FleetChange(member=member, what="alive"))
        if state is not None and state is not member.state:
            member.state = state
            changes.append(FleetChange(member=member, what=f"state:{state.value}", state=state))
        member.policy, member.in_flight = policy, in_flight
        if failure:
            member.is_final = is_final
            changes += self.mark_dead(member, failure)
        return True, changes

    def leave(self, member_id: str, incarnation: str, reason: str) -> list[FleetChange]:
        """Notes that a member left in order."""
        member = self._members.get(member_id)
        if member is None or member.incarnation != incarnation or not member.usable:
            return []
        member.health, member.failure = move(member.health, Health.LEFT), reason
        return [FleetChange(member=member, what="left", reason=reason)]

    def ended(self, member_id: str, incarnations: Collection[str], reason: str) -> list[FleetChange]:
        """Notes that processes have ended; a member with another incarnation does not change."""
        member = self._members.get(member_id)
        if member is None or member.incarnation not in incarnations:
            return []
        return self.mark_dead(member, reason)

    def mark_dead(self, member: Member, reason: str) -> list[FleetChange]:
        """Removes a member from the fleet for good."""
        if not member.usable:
            return []
        member.health, member.failure = move(member.health, Health.DEAD), reason
        return [FleetChange(member=member, what="dead", reason=reason)]

    def sweep(self) -> list[FleetChange]:
        """Suspects silent members, or marks them dead; call it every SWEEP_S seconds."""
        now = self._clock.monotonic()
        late_s = 0.0 if self._swept is None else max(0.0, now - self._swept - 2 * SWEEP_S)
        self._swept = now
        changes: list[FleetChange] = []
        for member in self.members():
            member.last_heard = min(now, member.last_heard + late_s)
            silent_s = now - member.last_heard
            if not member.usable:
                continue
            patience = START_PATIENCE if member.is_starting else 1.0
            if silent_s > patience * self._dead_after_s:
                changes += self.mark_dead(member, f"silent for {silent_s:.1f} s")
            elif silent_s > patience * self._suspect_after_s and member.health is Health.ALIVE:
                member.health = move(member.health, Health.SUSPECT)
                changes.append(
                    FleetChange(member=member, what="suspect", reason=f"silent for {silent_s:.1f} s")
                )
        return changes
