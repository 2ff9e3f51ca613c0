"""Reads and writes ends.jsonl in the run directory: which processes ended unexpectedly, when and how.

The launcher writes one line per end. The journal cannot: its writer is one of the processes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.service.disk import writing

FILE = "ends.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessEnd:
    """Records how and when a process ended.

    Attributes:
        time: Unix time.
        name: name of the process, as in run.json.
        outcome: "killed by SIGSEGV", or its exit code.
        step: the run's step at that time; 0 before the first.
    """

    time: float
    name: str
    outcome: str
    step: int
    restarts: bool

    def __str__(self) -> str:
        """Returns a sentence without its full stop."""
        killed = self.outcome.startswith("killed")
        how = f"was {self.outcome}" if killed else f"ended with {self.outcome}"
        after = "started again" if self.restarts else "not started again"
        return f"{self.name} {how} {self.where}; {after}"

    @property
    def where(self) -> str:
        """Returns the step and the time of day."""
        step = f"in step {self.step}" if self.step else "before step 1"
        return f"{step} at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.time))}"


def append(run_dir: Path, end: ProcessEnd) -> None:
    """Appends a line; first ends an incomplete last line."""
    with writing(run_dir), (run_dir / FILE).open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        begin = b"\n" if file.read(1) not in (b"", b"\n") else b""
        file.write(begin + json.dumps(asdict(end)).encode() + b"\n")


def read(run_dir: Path) -> Iterator[ProcessEnd]:
    """Yields the ends of a run in order; ignores a missing file and an incomplete last line."""
    path = run_dir / FILE
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            plain = json.loads(line)
            yield ProcessEnd(**{name: plain[name] for name in ProcessEnd.__slots__})
        except (ValueError, KeyError, TypeError):
            continue
