"""What people see of a run: the numbers of a step, and plain lines for where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Protocol, TextIO

from paceline.cli.metrics import columns

Metrics = Mapping[str, float]


class View(Protocol):
    """Told what happens, in order; shows it."""

    def milestone(self, text: str) -> None:
        """A part of the start-up is done or begins."""
        ...

    def phase(self, *, step: int, phase: str, admitted: int, wanted: int) -> None:
        """The run is in this phase; counts are 0 where they say nothing."""
        ...

    def step(self, step: int, metrics: Metrics) -> None:
        """A step is finished."""
        ...

    def notice(self, text: str) -> None:
        """Something that people should know."""
        ...

    def pulse(self) -> None:
        """Called about once a second, so that no long wait passes without a sign of life."""
        ...

    def close(self) -> None:
        """Nothing follows."""
        ...


class PlainView:
    """One line a step and one a milestone; a sign of life every `quiet_s` seconds without either."""

    def __init__(self, total_steps: int, *, out: TextIO | None = None, quiet_s: float = 20.0) -> None:
        self._total_steps, self._out, self._quiet_s = total_steps, out or sys.stdout, quiet_s
        self._began = self._spoke = self._phase_began = time.monotonic()
        self._step, self._phase, self._words = 0, "start", "start"

    def milestone(self, text: str) -> None:
        """One line with the seconds since the start."""
        self._say(f"[{time.monotonic() - self._began:6.1f} s] {text}")

    def phase(self, *, step: int, phase: str, admitted: int, wanted: int) -> None:
        """Silent: the step's line will have the seconds."""
        if (step, phase) != (self._step, self._phase):
            self._phase_began = time.monotonic()
        self._step, self._phase, self._words = step, phase, phase_words(phase, admitted, wanted)

    def pulse(self) -> None:
        """One line where nothing was said for long."""
        now = time.monotonic()
        if now - self._spoke > self._quiet_s:
            seconds = now - self._phase_began
            self._say(f"step {self._step}/{self._total_steps}: {self._words}, {seconds:.0f} s so far")

    def step(self, step: int, metrics: Metrics) -> None:
        """One line; none of the starting weights that are not validated."""
        if any(column.cell(metrics) for column in columns()):
            self._say(step_line(step, self._total_steps, metrics))

    def notice(self, text: str) -> None:
        """One line."""
        self._say(f"note: {text}")

    def close(self) -> None:
        """Nothing to do."""

    def _say(self, line: str) -> None:
        self._spoke = time.monotonic()
        print(line, file=self._out, flush=True)


def step_line(step: int, total_steps: int, metrics: Metrics) -> str:
    """A step in one line."""
    cells = [(column, column.cell(metrics)) for column in columns()]
    parts = [f"{column.title} {cell} {column.unit}".rstrip() for column, cell in cells if cell]
    return f"step {step}/{total_steps}  " + "  ".join(parts)


def phase_words(phase: str, admitted: int, wanted: int) -> str:
    """A phase, with how far it is where that is known."""
    return f"{phase} {admitted}/{wanted}" if wanted else phase
