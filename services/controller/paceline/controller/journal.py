"""The journal: the events of a run in order, each written before it takes effect.

Every event is one JSON line of events.jsonl in the run directory:
`{"n": 17, "time": 1763690000.1, "event": "trajectory", "step": 3, ...}`. `n` counts without gaps within one
file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.core.clock import Clock

Event = Mapping[str, Any]


class Journal:
    """Appends events to the file, with one unbuffered write per call.

    A killed process therefore loses no event whose effect was seen.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._clock = clock
        path.parent.mkdir(parents=True, exist_ok=True)
        self._next = _count_lines(path)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    async def record(self, event: str, **fields: object) -> None:
        """Appends one event."""
        await self.record_all([{"event": event, **fields}])

    async def record_all(self, events: Iterable[Event]) -> None:
        """Appends several events in one write."""
        lines = []
        for event in events:
            stamped = {"n": self._next, "time": round(self._clock.wall(), 6), **event}
            lines.append(json.dumps(stamped, separators=(",", ":"), default=str) + "\n")
            self._next += 1
        if lines:
            os.write(self._file, "".join(lines).encode())

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


def _count_lines(path: Path) -> int:
    if not path.exists():
        return 0
    with path.open("rb") as lines:
        return sum(1 for _ in lines)
