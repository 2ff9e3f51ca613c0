"""The lines of metrics.jsonl: finds each step's line, and checks their order."""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any


class MetricsLines:
    """Reads the file once for the step of each line, and a line's content again on request.

    The second line of a step is that of its validation beside training.

    Attributes:
        steps: the step of each complete line, in the order of the file; -1 for an unreadable line.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.steps = path, array("q")
        self._places: dict[int, tuple[int, int]] = {}
        self._of_validations: dict[int, tuple[int, int]] = {}
        if not path.exists():
            return
        with path.open("rb") as file:
            start = 0
            for line in file:
                if line.endswith(b"\n"):
                    step = _step_of(line)
                    self.steps.append(step)
                    places = self._of_validations if step in self._places else self._places
                    places[step] = start, len(line) - 1
                start += len(line)

    def of(self, step: int, *, of_validation: bool = False) -> tuple[bytes, dict[str, Any]] | None:
        """Returns the line of a step, or of its validation beside training, and its content; or None."""
        places = self._of_validations if of_validation else self._places
        if step < 0 or step not in places:
            return None
        start, length = places[step]
        with self._path.open("rb") as file:
            file.seek(start)
            line = file.read(length)
        return line, json.loads(line)

    def fault(self, finished: Collection[int], last: int, validated: Collection[int] = ()) -> str:
        """Returns a fault in the order of the lines' steps, or "".

        Args:
            finished: the finished steps, each of which must have a line.
            last: the last of them; the step after it may have a line.
            validated: the steps that may have a second line, that of their validation.
        """
        expected = sorted(finished)
        given = self._without_validations(validated)
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

    def _without_validations(self, validated: Collection[int]) -> Sequence[int]:
        """Returns the steps of the lines, without the second line of the steps in `validated`."""
        given: list[int] = []
        seen, second = set[int](), set[int]()
        for step in self.steps:
            if step in seen and step in validated and step not in second:
                second.add(step)
            else:
                given.append(step)
            seen.add(step)
        return given


def _step_of(line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1
