"""What a run of `paceline chaos` writes down: a line per fault, and the table at the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.table import Table

from paceline.cli.chaos.faults import Fault

FILE = "chaos.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outage:
    """A fault and how the run recovered from it.

    Attributes:
        time: Unix time of the fault.
        step, phase: where the run was.
        step_s: seconds from the fault until a step was finished that had not been; None: never.
        ready_s: seconds until all members were ready; None: never.
    """

    number: int
    time: float
    fault: Fault
    step: int
    phase: str
    step_s: float | None
    ready_s: float | None

    @property
    def recovery_s(self) -> float | None:
        """Seconds until the run was going on with all its members; None for a hang."""
        if self.step_s is None or self.ready_s is None:
            return None
        return max(self.step_s, self.ready_s)

    def to_json(self) -> str:
        """As a line of chaos.jsonl."""
        return json.dumps(
            {
                "n": self.number,
                "time": round(self.time, 3),
                "fault": self.fault.kind.value,
                "target": self.fault.target,
                "seconds": round(self.fault.seconds, 2),
                "step": self.step,
                "phase": self.phase,
                "step_s": _rounded(self.step_s),
                "ready_s": _rounded(self.ready_s),
                "recovery_s": _rounded(self.recovery_s),
            }
        )


class Record:
    """Appends outages to chaos.jsonl in the run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        self.outages: list[Outage] = []

    def add(self, outage: Outage) -> None:
        """Writes a line."""
        self.outages.append(outage)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(outage.to_json() + "\n")


def table(outages: Sequence[Outage]) -> Table:
    """Counts and recovery times by kind and target."""
    rows: dict[tuple[str, str], list[Outage]] = {}
    for outage in outages:
        rows.setdefault((outage.fault.kind.value, outage.fault.target), []).append(outage)
    drawn = Table("fault", "target", box=None, pad_edge=False)
    for title in ("times", "median s", "longest s", "hangs"):
        drawn.add_column(title, justify="right")
    for (kind, target), group in sorted(rows.items()):
        times = [outage.recovery_s for outage in group if outage.recovery_s is not None]
        cells = (f"{median(times):.1f}", f"{max(times):.1f}") if times else ("", "")
        drawn.add_row(kind, target, str(len(group)), *cells, str(len(group) - len(times)))
    return drawn


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
