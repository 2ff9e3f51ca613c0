"""Time as a parameter: code that waits or measures takes a Clock, so that tests set the time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """`monotonic` seconds for durations and deadlines, `wall` seconds for records."""

    def monotonic(self) -> float:
        """Returns the seconds since some fixed moment, never going back."""

    def wall(self) -> float:
        """Returns the seconds since the epoch."""


class SystemClock:
    """Reads the clocks of this machine."""

    def monotonic(self) -> float:
        """Returns the seconds since some fixed moment, never going back."""
        return time.monotonic()

    def wall(self) -> float:
        """Returns the seconds since the epoch."""
        return time.time()
