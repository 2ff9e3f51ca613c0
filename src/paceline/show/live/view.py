"""The interface of views of a running run, and a view with plain lines for output that is not a terminal."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Protocol, TextIO

from paceline.show.metrics import columns

Metrics = Mapping[str, float]

_QUIET_AT_START_S = 5.0
_PACE_STEPS = 10


class View(Protocol):
    """Shows what happens in a run; called in the order of the events."""

    def milestone(self, text: str) -> None:
        """Shows that a part of the start-up begins or is done."""

    def phase(self, *, step: int, phase: str, admitted: int, wanted: int) -> None:
        """Shows that the run is in this phase; the counts are 0 in a phase that counts nothing."""

    def step(self, step: int, metrics: Metrics) -> None:
        """Shows a step that is finished."""

    def validation(self, step: int, metrics: Metrics) -> None:
        """Shows a validation that arrived while later steps were trained."""

    def notice(self, text: str) -> None:
        """Shows messages for the user."""

    def pulse(self) -> None:
        """Is called about once a second, so that a view can show a sign of life during long waits."""

    def close(self) -> None:
        """Is called when nothing more follows."""


class PlainView:
    """Prints a line per step and milestone, and a sign of life after `quiet_s` seconds without either.

    Before the first step it prints the sign of life after 5 s.
    """

    def __init__(self, total_steps: int, *, out: TextIO | None = None, quiet_s: float = 20.0) -> None:
        self._total_steps, self._out, self._quiet_s = total_steps, out or sys.stdout, quiet_s
        self._began = self._last_line_at = self._phase_began = time.monotonic()
        self._step, self._phase, self._words, self._has_steps = 0, "start", "start", False
        self._pace = Pace(total_steps)

    def milestone(self, text: str) -> None:
        """Prints the text with the seconds since the start."""
        self._say(f"[{time.monotonic() - self._began:6.1f} s] {text}")

    def phase(self, *, step: int, phase: str, admitted: int, wanted: int) -> None:
        """Prints nothing, because the step's line has the seconds of its phases."""
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
        """Prints a line, unless no column has a number, as for starting weights without a validation."""
        self._has_steps = True
        self._pace.step(step, time.monotonic())
        if any(column.cell(metrics) for column in columns(metrics)):
            self._say(f"{step_line(step, self._total_steps, metrics)}  {self._pace.words()}".rstrip())

    def validation(self, step: int, metrics: Metrics) -> None:
        """Prints the validation as a line."""
        self._say(f"validation of {step_line(step, self._total_steps, metrics)}")

    def notice(self, text: str) -> None:
        """Prints the notice as a line."""
        self._say(f"note: {text}")

    def close(self) -> None:
        """Does nothing: no line is open."""

    def _say(self, line: str) -> None:
        self._last_line_at = time.monotonic()
        print(line, file=self._out, flush=True)


class JsonView:
    """Prints a JSON object per line for programs: what happened, the steps with all their metrics."""

    def __init__(self, total_steps: int, *, out: TextIO | None = None) -> None:
        self._total_steps, self._out = total_steps, out or sys.stdout
        self._began, self._pace = time.monotonic(), Pace(total_steps)
        self._step = 0

    def milestone(self, text: str) -> None:
        """Prints a part of the start-up."""
        self._say(event="milestone", text=text)

    def phase(self, *, step: int, phase: str, admitted: int, wanted: int) -> None:
        """Prints that a step has begun; its line has the seconds of its phases."""
        if step != self._step:
            self._step = step
            self._say(event="begin", step=step)

    def step(self, step: int, metrics: Metrics) -> None:
        """Prints the step; a number that is not finite is null."""
        self._pace.step(step, time.monotonic())
        self._say(
            event="step",
            step=step,
            total_steps=self._total_steps,
            to_go_s=self._pace.to_go_s,
            metrics=_finite(metrics),
        )

    def validation(self, step: int, metrics: Metrics) -> None:
        """Prints the numbers of the step's validation; a number that is not finite is null."""
        self._say(event="validation", step=step, metrics=_finite(metrics))

    def notice(self, text: str) -> None:
        """Prints the notice as a JSON object."""
        self._say(event="note", text=text)

    def pulse(self) -> None:
        """Does nothing: the passage of time is not an event."""

    def close(self) -> None:
        """Does nothing: no line is open."""

    def end(self, *, ok: bool, message: str, run_dir: str) -> None:
        """Prints how the run ended."""
        self._say(event="end", ok=ok, message=message, run_dir=run_dir)

    def _say(self, **fields: object) -> None:
        line = {"seconds": round(time.monotonic() - self._began, 3), **fields}
        print(json.dumps(line), file=self._out, flush=True)


def _finite(metrics: Metrics) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


class Pace:
    """Estimates from the last steps how long the rest of a run will take."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._ends: deque[tuple[int, float]] = deque(maxlen=_PACE_STEPS + 1)

    def step(self, step: int, now: float) -> None:
        """Notes the end of a step; `now` is monotonic."""
        self._ends.append((step, now))

    @property
    def to_go_s(self) -> float | None:
        """Returns the seconds to the end; None before a step has been timed."""
        if len(self._ends) < 2:
            return None
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        if last <= first:
            return None
        return round((self._total_steps - last) * (ended - began) / (last - first), 1)

    def words(self) -> str:
        """Returns the time to the end in words; "" if it is unknown or nothing is left."""
        return f"to go {clock(self.to_go_s)}" if self.to_go_s else ""


def clock(seconds: float) -> str:
    """Returns seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def step_line(step: int, total_steps: int, metrics: Metrics) -> str:
    """Returns a step in one line."""
    cells = [(column, column.cell(metrics)) for column in columns(metrics)]
    parts = [f"{column.title} {cell} {column.unit}".rstrip() for column, cell in cells if cell]
    return f"step {step}/{total_steps}  " + "  ".join(parts)


def phase_words(phase: str, admitted: int, wanted: int) -> str:
    """Returns a phase, with its progress if that is known."""
    return f"{phase} {admitted}/{wanted}" if wanted else phase
