"""How long a run that loses members goes on trying without finishing a step. Pure; time is given."""

from __future__ import annotations

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0


class MemberLossBackoff:
    """Spaces the tries of a run that loses members, and ends them.

    A member that stands still is not lost yet, but fails every call at once: tries are bounded by time, not
    by number, and pauses between them double.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._finished = self._count = -1
        self._since = 0.0

    def next_pause(self, finished: int, now: float) -> float | None:
        """Notes a loss; returns the seconds to wait before the next try, or None: the run ends.

        Args:
            finished: the last finished step.
            now: monotonic time.
        """
        if finished > self._finished or self._count < 0:
            self._finished, self._count, self._since = finished, 0, now
        if now - self._since > self._patience_s:
            return None
        pause_s: float = _FIRST_PAUSE_S * 2**self._count
        self._count = min(self._count + 1, 10)
        return min(pause_s, _LONGEST_PAUSE_S)
