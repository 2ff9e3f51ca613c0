"""Writes the report of a run directory to a file."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.report.data import read_run
from paceline.cli.report.page import page
from paceline.core.errors import DataError
from paceline.service.process import write_atomically

FILE_NAME = "report.html"
_FILES_OF_A_RUN = ("metrics.jsonl", "events.jsonl", "config.resolved.yaml")


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Writes the page of a run that has ended or is under way; returns its path.

    Raises:
        DataError: the folder holds no run.
    """
    if not any((run_dir / name).exists() for name in _FILES_OF_A_RUN):
        raise DataError(f"{run_dir} holds no run (no metrics.jsonl); give a run directory")
    path = out or run_dir / FILE_NAME
    write_atomically(path, page(read_run(run_dir)))
    return path
