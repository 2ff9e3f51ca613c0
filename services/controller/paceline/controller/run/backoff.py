"""How long a run that loses members keeps trying to finish a step. Pure: the caller passes the time."""

from __future__ import annotations

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0


class MemberLossBackoff:
    """Sets the pauses between the attempts of a run that loses members, and a limit on their time.

    Calls to a member that is frozen may fail at once before the member counts as lost. So attempts are
    bounded by time, not by number, and pauses between them double.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._finished = self._count = -1
        self._since = 0.0

    def next_pause(self, finished: int, now: float) -> float | None:
        """Notes a loss; returns the seconds to wait before the next attempt, or None if the run must end.

        Args:
            now: monotonic time.
        """
        if finished > self._finished or self._count < 0:
            self._finished, self._count, self._since = finished, 0, now
        if now - self._since > self._patience_s:
            return None
        pause_s: float = _FIRST_PAUSE_S * 2**self._count
        self._count = min(self._count + 1, 10)
        return min(pause_s, _LONGEST_PAUSE_S)
