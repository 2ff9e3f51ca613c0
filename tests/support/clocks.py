"""A clock whose time the test sets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ManualClock:
    """A clock that moves only when told to."""

    now: float = 0.0

    def monotonic(self) -> float:
        """The seconds set so far."""
        return self.now

    def wall(self) -> float:
        """The same seconds."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Moves time on."""
        self.now += seconds
