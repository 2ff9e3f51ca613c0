"""Quarantine: a rollout server that fails several joins in a row stays out of weight groups for a while.
Pure.

    failure 1, 2 -> taken again at once     failure 3, 4, 5, ... -> out for 30 s, 60 s, 120 s, ... 10 min
    a served policy -> the count is 0 again
    the same refusal three times in a row -> `refusal` returns it, as a fourth attempt would be refused, too

Failures are counted by member id, not by incarnation: a server that crashes in every push has a new
incarnation each time.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.clock import Clock
from paceline.core.errors import ModelError, WeightSyncError

_FREE_FAILURES = 2
_FIRST_S, _LONGEST_S = 30.0, 600.0
_REFUSALS = (ModelError.__name__, WeightSyncError.__name__)


@dataclass(kw_only=True, slots=True)
class _Record:
    failures: int = 0
    until: float | None = None
    reason: str = ""
    num_alike: int = 0


class Quarantine:
    """Which members stay out of weight groups, and until when."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}

    def failed(self, member_id: str, reason: str) -> float:
        """Notes a failed join or push; returns the seconds that the member stays out, 0 if it does not."""
        record = self._records.setdefault(member_id, _Record())
        record.failures += 1
        record.num_alike = record.num_alike + 1 if reason == record.reason else 1
        record.reason = reason
        if record.failures <= _FREE_FAILURES:
            return 0.0
        doublings = min(record.failures - _FREE_FAILURES - 1, 16)
        seconds = min(_FIRST_S * 2.0**doublings, _LONGEST_S)
        record.until = self._clock.monotonic() + seconds
        return seconds

    def succeeded(self, member_id: str) -> None:
        """Notes that a member serves the weights that were pushed to it."""
        self._records.pop(member_id, None)

    def failures(self, member_id: str) -> int:
        """Returns how often in a row a member has failed."""
        record = self._records.get(member_id)
        return record.failures if record else 0

    def refusal(self, member_id: str) -> str:
        """Returns the reason of a member's last three failures if all were the same refusal, else "".

        The loss of a process or a connection is not a refusal, because it need not happen again.
        """
        record = self._records.get(member_id)
        is_refusal = (
            record is not None and record.num_alike > _FREE_FAILURES and record.reason.startswith(_REFUSALS)
        )
        return record.reason if record and is_refusal else ""

    def holds(self, member_id: str) -> bool:
        """Returns whether a member must stay out now."""
        record = self._records.get(member_id)
        return record is not None and record.until is not None

    def release(self) -> list[str]:
        """Releases members whose time is over and returns their ids; their failures still count."""
        now, released = self._clock.monotonic(), []
        for member_id, record in self._records.items():
            if record.until is not None and now >= record.until:
                record.until = None
                released.append(member_id)
        return released
