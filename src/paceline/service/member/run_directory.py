"""Stores the run id in the run directory, by which processes on other hosts recognise the directory."""

from __future__ import annotations

from pathlib import Path

from paceline.service.process import write_atomically

_RUN_ID = "run.id"


def read_run_id(run_dir: Path) -> str:
    """Returns the id of the run in a run directory; "" if there is none."""
    try:
        return (run_dir / _RUN_ID).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def write_run_id(run_dir: Path, run_id: str) -> None:
    """Writes the run's id into its directory."""
    if read_run_id(run_dir) != run_id:
        write_atomically(run_dir / _RUN_ID, f"{run_id}\n")
