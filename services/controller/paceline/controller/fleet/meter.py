"""Counts events of members: changes, restarts, and how long a lost one takes to come back."""

from __future__ import annotations

from paceline.controller.fleet.membership import FleetChange, Health
from paceline.core.clock import Clock
from paceline.core.members import READY_STATES
from paceline.service.observability import metrics, telemetry

_LOST = (Health.DEAD.value, Health.LEFT.value)
_CHANGES = ("registered", *(health.value for health in Health))


class FleetMeter:
    """Turns the changes of a fleet into metrics."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._incarnations: dict[str, str] = {}
        self._lost_at: dict[str, float] = {}

    def note(self, change: FleetChange) -> None:
        """Takes note of a change."""
        member, kind = change.member.member_id, change.member.kind.value
        if change.what == "registered":
            # Counters begin at 0: if a counter appeared with the value 1, its first increase would not be
            # seen.
            for what in _CHANGES:
                telemetry.count(metrics.MEMBER_CHANGES, 0, kind=kind, change=what)
            now, before = change.member.incarnation, self._incarnations.get(member)
            # The same incarnation registers again if it was wrongly taken for dead.
            is_restart = before not in (None, now)
            telemetry.count(metrics.MEMBER_RESTARTS, int(is_restart), kind=kind, member=member)
            self._incarnations[member] = now
        if change.state is None:
            telemetry.count(metrics.MEMBER_CHANGES, kind=kind, change=change.what)
        if change.what in _LOST:
            self._lost_at.setdefault(member, self._clock.monotonic())
        elif change.state in READY_STATES and member in self._lost_at:
            seconds = self._clock.monotonic() - self._lost_at.pop(member)
            telemetry.record(metrics.RECOVERY_SECONDS, seconds, kind=kind, member=member)
