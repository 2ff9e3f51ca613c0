"""The live table of a run on a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from paceline.show.live.view import Metrics, Pace, clock, phase_words
from paceline.show.metrics import columns

_NUM_ROWS = 14
_NUM_NOTICES = 4
_NOTICE_S = 120.0
_GAP = 2
_BAR_WIDTH = 24


class LiveView:
    """A table with a row per step and a status line, redrawn several times a second."""

    def __init__(self, title: str, total_steps: int, *, console: Console | None = None) -> None:
        self._title, self._total_steps = title, total_steps
        self._began = self._phase_began = time.monotonic()
        self._rows: deque[tuple[int, Metrics]] = deque(maxlen=_NUM_ROWS)
        self._notices: deque[tuple[float, str]] = deque(maxlen=_NUM_NOTICES)
        self._pace = Pace(total_steps)
        self._milestones: list[tuple[float, str]] = []
        self._step, self._phase, self._admitted, self._wanted = 0, "starting", 0, 0
        self._closed = False
        self._console = console or Console(markup=False)
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(
            get_renderable=self._draw, console=self._console, refresh_per_second=5, transient=False
        )
        self._live.start()

    def milestone(self, text: str) -> None:
        """Adds a line to the list of start-up events; once there are rows, changes the status line."""
        self._milestones.append((time.monotonic() - self._began, text))
        if self._rows:
            self.phase(step=self._step, phase=text, admitted=0, wanted=0)

    def phase(self, *, step: int, phase: str, admitted: int, wanted: int) -> None:
        """Shows the phase in the status line."""
        if (step, phase) != (self._step, self._phase):
            self._phase_began = time.monotonic()
        self._step, self._phase, self._admitted, self._wanted = step, phase, admitted, wanted

    def step(self, step: int, metrics: Metrics) -> None:
        """Adds a row; the first one replaces the list of start-up events."""
        if not self._rows:
            self._notices.clear()
        self._rows.append((step, metrics))
        self._pace.step(step, time.monotonic())

    def validation(self, step: int, metrics: Metrics) -> None:
        """Completes the step's row, if the table still has it."""
        for place, (of_row, known) in enumerate(self._rows):
            if of_row == step:
                self._rows[place] = (step, {**known, **metrics})

    def notice(self, text: str) -> None:
        """Adds a line under the table, which disappears after a while."""
        self._notices.append((time.monotonic(), text))

    def pulse(self) -> None:
        """Does nothing: the table redraws itself."""

    def close(self) -> None:
        """Draws the final table and leaves it on the screen."""
        if not self._closed:
            self._closed = True
            self._live.stop()

    def _draw(self) -> RenderableType:
        parts: list[RenderableType] = [Text(self._title, style="bold", no_wrap=True, overflow="ellipsis")]
        if self._rows:
            parts.append(self._table())
        else:
            parts += [Text(f"  {seconds:6.1f} s  {text}", style="dim") for seconds, text in self._milestones]
        now = time.monotonic()
        notices = [text for said, text in self._notices if now - said < _NOTICE_S]
        parts += [Text(f"note: {text}", style="yellow") for text in notices]
        if not self._closed:
            parts.append(self._status())
        return Group(*parts)

    def _table(self) -> Table:
        """Returns the last steps in as many columns as fit; columns on the right are dropped first."""
        titles, lines = ["step"], [[f"{step}/{self._total_steps}"] for step, _ in self._rows]
        for column in columns(dict.fromkeys(name for _, metrics in self._rows for name in metrics)):
            titles.append(f"{column.title} {column.unit}".rstrip())
            for line, (_, metrics) in zip(lines, self._rows, strict=True):
                line.append(column.cell(metrics))
        num_columns = _num_fitting([titles, *lines], self._console.width)
        table = Table(box=None, pad_edge=False, header_style="bold cyan", padding=(0, _GAP, 0, 0))
        for title in titles[:num_columns]:
            table.add_column(title, justify="right", no_wrap=True)
        for line in lines:
            table.add_row(*line[:num_columns])
        return table

    def _status(self) -> RenderableType:
        now = time.monotonic()
        words = phase_words(self._phase, self._admitted, self._wanted)
        text = Text.assemble(
            (f"step {self._step}/{self._total_steps}  ", "bold"),
            (words, "cyan"),
            f"  {now - self._phase_began:.1f} s",
            (f"   run {clock(now - self._began)}", "dim"),
            (f"  {self._pace.words()}".rstrip(), "dim"),
            no_wrap=True,
            overflow="ellipsis",
        )
        line = Table.grid(padding=(0, 1))
        if text.cell_len + _BAR_WIDTH + 4 <= self._console.width:
            line.add_row(self._spinner, text, _bar(self._admitted, self._wanted))
        else:
            line.add_row(self._spinner, text)
        return line


def _bar(done: int, total: int) -> Any:
    return ProgressBar(total=total, completed=done, width=_BAR_WIDTH) if total else ""


def _num_fitting(lines: Sequence[Sequence[str]], width: int) -> int:
    """Returns how many columns of a table fit into `width`, at least one."""
    used, count = 0, 0
    for cells in zip(*lines, strict=True):
        used += max(map(len, cells)) + _GAP
        # The gap after the last column needs no room.
        if count and used - _GAP > width:
            break
        count += 1
    return count
