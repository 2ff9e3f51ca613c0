"""Presence: how long the controller has not heard from a running process. The caller passes the time."""

from __future__ import annotations

from dataclasses import dataclass

# When the controller has declared a silent member dead, the launcher still waits this long for a sign of
# life: the member may only have been cut off, and a restart costs more than the wait.
_GRACE_S = 12.0
# One look counts for at most this long: the launcher itself may have been stopped since the last look.
_LONGEST_LOOK_S = 6.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sighting:
    """The controller's report on a member. `alive`: neither dead nor gone; `ready`: it can work."""

    heard_s_ago: float
    alive: bool
    ready: bool


class Presence:
    """Decides from the controller's reports on a member whether its running process is hung.

    Time in which the controller did not answer does not count, and reports on an earlier process with the
    same member id are ignored.

    Args:
        startup_s: how long a process may take to register.
        silence_s: the silence after which the controller declares a member dead, and how long a registered
            member may be unknown to it.
    """

    def __init__(self, *, startup_s: float, silence_s: float) -> None:
        self._startup_s, self._silence_s = startup_s, silence_s
        self._started = self._looked = self._missing_s = 0.0
        self._heard = self.was_ready = False

    def start(self, now: float) -> None:
        """Notes that the process has started."""
        self._started = self._looked = now
        self._missing_s, self._heard = 0.0, False

    def skip(self, now: float) -> None:
        """Notes that the controller did not answer."""
        self._looked = now

    def look(self, sighting: Sighting | None, now: float) -> str | None:
        """Notes the controller's answer; returns why the process counts as hung, or None.

        `sighting` is None for a member that the controller does not know.
        """
        elapsed_s, self._looked = min(now - self._looked, _LONGEST_LOOK_S), now
        if sighting is not None and now - sighting.heard_s_ago > self._started:
            self._heard = True
            self.was_ready = self.was_ready or sighting.ready
            if sighting.alive:
                self._missing_s = 0.0
                return None
        self._missing_s += elapsed_s
        if not self._heard:
            late = self._missing_s > self._startup_s
            return f"has not registered within {self._missing_s:.0f} s of its start" if late else None
        if sighting is None:
            silent_s, missed = self._missing_s, self._missing_s > self._silence_s
        else:
            # Both the controller and the looks must have seen the silence: the controller may have paused.
            silent_s = sighting.heard_s_ago
            missed = silent_s > self._silence_s + _GRACE_S and self._missing_s > _GRACE_S
        return f"runs, but has not been heard of for {silent_s:.0f} s" if missed else None
