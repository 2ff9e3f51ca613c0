"""The live table of a run on a terminal."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from paceline.cli.live.view import Metrics, phase_words
from paceline.cli.metrics import columns

_NUM_ROWS = 14
_NUM_NOTICES = 4


class LiveView:
    """A table with a row per step and a status line, redrawn several times a second."""

    def __init__(self, title: str, total_steps: int, *, console: Console | None = None) -> None:
        self._title, self._total_steps = title, total_steps
        self._began = self._phase_began = time.monotonic()
        self._rows: deque[tuple[int, Metrics]] = deque(maxlen=_NUM_ROWS)
        self._notices: deque[str] = deque(maxlen=_NUM_NOTICES)
        self._milestones: list[tuple[float, str]] = []
        self._step, self._phase, self._admitted, self._wanted = 0, "starting", 0, 0
        self._closed = False
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(
            get_renderable=self._draw, console=console or Console(), refresh_per_second=5, transient=False
        )
        self._live.start()

    def milestone(self, text: str) -> None:
        """Adds a line to the list of the start-up; once there are rows, changes the status line."""
        self._milestones.append((time.monotonic() - self._began, text))
        if self._rows:
            self.phase(step=self._step, phase=text, admitted=0, wanted=0)

    def phase(self, *, step: int, phase: str, admitted: int, wanted: int) -> None:
        """Changes the status line."""
        if (step, phase) != (self._step, self._phase):
            self._phase_began = time.monotonic()
        self._step, self._phase, self._admitted, self._wanted = step, phase, admitted, wanted

    def step(self, step: int, metrics: Metrics) -> None:
        """Adds a row."""
        self._rows.append((step, metrics))

    def notice(self, text: str) -> None:
        """Adds a line under the table."""
        self._notices.append(text)

    def pulse(self) -> None:
        """Does nothing: the table redraws itself."""

    def close(self) -> None:
        """Draws the final table and leaves it on the screen."""
        if not self._closed:
            self._closed = True
            self._live.stop()

    def _draw(self) -> RenderableType:
        parts: list[RenderableType] = [Text(self._title, style="bold")]
        if self._rows:
            parts.append(self._table())
        else:
            parts += [Text(f"  {seconds:6.1f} s  {text}", style="dim") for seconds, text in self._milestones]
        parts += [Text(f"note: {text}", style="yellow") for text in self._notices]
        if not self._closed:
            parts.append(self._status())
        return Group(*parts)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold cyan", padding=(0, 2, 0, 0))
        table.add_column("step", justify="right")
        shown = columns()
        for column in shown:
            table.add_column(f"{column.title} {column.unit}".rstrip(), justify="right", no_wrap=True)
        for step, metrics in self._rows:
            table.add_row(f"{step}/{self._total_steps}", *(column.cell(metrics) for column in shown))
        return table

    def _status(self) -> RenderableType:
        now = time.monotonic()
        words = phase_words(self._phase, self._admitted, self._wanted)
        text = Text.assemble(
            (f"step {self._step}/{self._total_steps}  ", "bold"),
            (words, "cyan"),
            f"  {now - self._phase_began:.1f} s",
            (f"   run {_clock(now - self._began)}", "dim"),
        )
        line = Table.grid(padding=(0, 1))
        line.add_row(self._spinner, text, _bar(self._admitted, self._wanted))
        return line


def _bar(done: int, total: int) -> Any:
    return ProgressBar(total=total, completed=done, width=24) if total else ""


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
