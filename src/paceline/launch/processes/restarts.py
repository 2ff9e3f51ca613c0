"""Restarts: which failures of a process a restart can fix, and how often. The caller passes the time."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from paceline.core.errors import EXIT_AGAIN, EXIT_FINAL, EXIT_GIVEN


class End(enum.Enum):
    """The kind of a process's end.

    LEFT: it ended by itself, without an error. FINAL: after a restart, it would end with the same error.
    FAILED: an error that may not come again. AGAIN: its start failed, and it says that the next start may
        succeed.
    KILLED: a signal ended it.
    """

    LEFT = "left"
    FINAL = "final"
    FAILED = "failed"
    AGAIN = "again"
    KILLED = "killed"


def judge(exit_codes: Collection[int]) -> End:
    """Returns the kind of end by the exit codes of processes that ended together; -N stands for signal N.

    A signal explains the errors of the others; an error that a restart cannot fix explains the rest.
    """
    if any(code < 0 for code in exit_codes):
        return End.KILLED
    if any(code in (EXIT_GIVEN, EXIT_FINAL) for code in exit_codes):
        return End.FINAL
    if EXIT_AGAIN in exit_codes:
        return End.AGAIN
    return End.FAILED if any(exit_codes) else End.LEFT


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartRule:
    """Allows at most `max_restarts` in any `window_s` seconds; pauses double from `first_pause_s` on."""

    max_restarts: int
    window_s: float
    first_pause_s: float = 0.25
    longest_pause_s: float = 5.0

    def __str__(self) -> str:
        plural = "" if self.max_restarts == 1 else "s"
        return f"{self.max_restarts} time{plural} within {self.window_s:g} s"


class RestartHistory:
    """The restarts of one unit; `next_pause` says when it is restarted, or that it is not."""

    def __init__(self, rule: RestartRule) -> None:
        self.rule = rule
        self._times: deque[float] = deque()

    @property
    def recent(self) -> int:
        """Number of restarts in the window that ended with the last restart."""
        return len(self._times)

    def next_pause(self, now: float) -> float | None:
        """Notes a restart and returns the seconds to wait before it, or None after too many restarts."""
        while self._times and self._times[0] <= now - self.rule.window_s:
            self._times.popleft()
        if len(self._times) >= self.rule.max_restarts:
            return None
        pause_s: float = self.rule.first_pause_s * 2 ** len(self._times)
        self._times.append(now)
        return min(pause_s, self.rule.longest_pause_s)
