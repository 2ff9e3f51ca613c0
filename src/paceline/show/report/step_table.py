"""The lines of metrics.jsonl as columns of numbers."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from paceline.show.report.lines import evenly

_NAN = float("nan")
_DIGITS = 7


class StepTable:
    """Holds a column per metric over the lines in order. If a step was repeated, its last line counts."""

    def __init__(self) -> None:
        self.steps = array("q")
        self._columns: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends the lines that have a step; a value that is not a number counts as missing."""
        for row in rows:
            if not isinstance(row.get("step"), int):
                continue
            count = len(self.steps)
            self.steps.append(row["step"])
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    column = self._columns.setdefault(name, array("d"))
                    column.extend([_NAN] * (count - len(column)))
                    column.append(value)

    def names(self) -> list[str]:
        """Returns the metrics that any line has."""
        return list(self._columns)

    def points(self, name: str) -> list[tuple[int, float]]:
        """Returns (step, value) for each step in which the metric was measured."""
        column = self._columns.get(name, array("d"))
        pairs = zip(self.steps, column, strict=False)
        return sorted({step: value for step, value in pairs if not math.isnan(value)}.items())

    def part(self, start: int, limit: int) -> dict[str, Any]:
        """Returns the lines from `start` on, for JSON; at most `limit` of them, evenly apart."""
        places = evenly(start, len(self), limit)
        columns = {name: _picked(column, places) for name, column in self._columns.items()}
        return {
            "num_lines": len(self),
            "steps": [self.steps[i] for i in places],
            "columns": {
                name: values for name, values in columns.items() if any(v is not None for v in values)
            },
        }


def _picked(column: array[float], places: Sequence[int]) -> list[float | None]:
    values = chain((column[i] for i in places if i < len(column)), (_NAN for i in places if i >= len(column)))
    return [float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in values]
