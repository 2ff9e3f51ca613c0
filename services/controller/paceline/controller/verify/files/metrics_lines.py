"""The lines of metrics.jsonl: finds each step's line, and checks their order."""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any


class MetricsLines:
    """Reads the file once for the step of each line, and a line's content again on request.

    Attributes:
        steps: the step of each complete line, in the order of the file; -1 for an unreadable line.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.steps = path, array("q")
        self._places: dict[int, tuple[int, int]] = {}
        if not path.exists():
            return
        with path.open("rb") as file:
            start = 0
            for line in file:
                if line.endswith(b"\n"):
                    step = _step_of(line)
                    self.steps.append(step)
                    self._places[step] = start, len(line) - 1
                start += len(line)

    def of(self, step: int) -> tuple[bytes, dict[str, Any]] | None:
        """Returns a step's line and its content; None if there is none."""
        if step < 0 or step not in self._places:
            return None
        start, length = self._places[step]
        with self._path.open("rb") as file:
            file.seek(start)
            line = file.read(length)
        return line, json.loads(line)

    def fault(self, finished: Collection[int], last: int) -> str:
        """Returns a fault in the order of the lines' steps, or "".

        Args:
            finished: the finished steps, each of which must have a line.
            last: the last of them; the step after it may have a line.
        """
        expected = sorted(finished)
        given: Sequence[int] = self.steps.tolist()
        if given in (expected, [*expected, last + 1]):
            return ""
        seen: set[int] = set()
        for number, step in enumerate(given, start=1):
            if step < 0:
                return f"has a line that cannot be read: line {number}"
            if step in seen:
                return f"has two lines of step {step}"
            seen.add(step)
        missing = [step for step in expected if step not in seen]
        if missing:
            return f"lacks step {missing[0]}, which is finished"
        known = set(expected)
        extra = [step for step in given if step not in known and step != len(expected)]
        if extra:
            return f"has a line of step {extra[0]}, which is not finished"
        return f"is not in the order of the steps: {', '.join(map(str, given))}"


def _step_of(line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1
