"""The id in a run directory, by which a process recognises the directory; another host may have its own."""

from __future__ import annotations

from pathlib import Path

from paceline.service.process import write_atomically

_RUN_ID = "run.id"


def read_run_id(run_dir: Path) -> str:
    """The id of the run in a run directory; "" where there is none."""
    try:
        return (run_dir / _RUN_ID).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def write_run_id(run_dir: Path, run_id: str) -> None:
    """Says in a run directory which run it belongs to."""
    if read_run_id(run_dir) != run_id:
        write_atomically(run_dir / _RUN_ID, f"{run_id}\n")
