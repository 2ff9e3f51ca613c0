"""Shows a run while it goes on: the interface of a view, and plain lines for output that is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Protocol, TextIO

from paceline.cli.metrics import columns

Metrics = Mapping[str, float]

_QUIET_AT_START_S = 5.0


class View(Protocol):
    """Shows what happens in a run; called in the order of the events."""

    def milestone(self, text: str) -> None:
        """A part of the start-up begins or is done."""
        ...

    def phase(self, *, step: int, phase: str, admitted: int, wanted: int) -> None:
        """The run is in this phase; the counts are 0 in a phase that counts nothing."""
        ...

    def step(self, step: int, metrics: Metrics) -> None:
        """A step is finished."""
        ...

    def notice(self, text: str) -> None:
        """People should know this."""
        ...

    def pulse(self) -> None:
        """Called about once a second, so that a view can show a sign of life during long waits."""
        ...

    def close(self) -> None:
        """Nothing more follows."""
        ...


class PlainView:
    """Prints a line per step and milestone, and a sign of life after `quiet_s` seconds without either.

    Before the first step it does so after 5 s.
    """

    def __init__(self, total_steps: int, *, out: TextIO | None = None, quiet_s: float = 20.0) -> None:
        self._total_steps, self._out, self._quiet_s = total_steps, out or sys.stdout, quiet_s
        self._began = self._last_line_at = self._phase_began = time.monotonic()
        self._step, self._phase, self._words, self._has_steps = 0, "start", "start", False

    def milestone(self, text: str) -> None:
        """Prints the text with the seconds since the start."""
        self._say(f"[{time.monotonic() - self._began:6.1f} s] {text}")

    def phase(self, *, step: int, phase: str, admitted: int, wanted: int) -> None:
        """Prints nothing: the line of the step has the seconds of its phases."""
        if (step, phase) != (self._step, self._phase):
            self._phase_began = time.monotonic()
        self._step, self._phase, self._words = step, phase, phase_words(phase, admitted, wanted)

    def pulse(self) -> None:
        """Prints a line after a long silence."""
        now = time.monotonic()
        quiet_s = self._quiet_s if self._has_steps else min(self._quiet_s, _QUIET_AT_START_S)
        if now - self._last_line_at > quiet_s:
            seconds = now - self._phase_began
            self._say(f"step {self._step}/{self._total_steps}: {self._words}, {seconds:.0f} s so far")

    def step(self, step: int, metrics: Metrics) -> None:
        """Prints a line, unless no column has a number: starting weights that are not validated."""
        self._has_steps = True
        if any(column.cell(metrics) for column in columns()):
            self._say(step_line(step, self._total_steps, metrics))

    def notice(self, text: str) -> None:
        """Prints a line."""
        self._say(f"note: {text}")

    def close(self) -> None:
        """Nothing to do."""

    def _say(self, line: str) -> None:
        self._last_line_at = time.monotonic()
        print(line, file=self._out, flush=True)


def step_line(step: int, total_steps: int, metrics: Metrics) -> str:
    """A step in one line."""
    cells = [(column, column.cell(metrics)) for column in columns()]
    parts = [f"{column.title} {cell} {column.unit}".rstrip() for column, cell in cells if cell]
    return f"step {step}/{total_steps}  " + "  ".join(parts)


def phase_words(phase: str, admitted: int, wanted: int) -> str:
    """A phase, with its progress if that is known."""
    return f"{phase} {admitted}/{wanted}" if wanted else phase
