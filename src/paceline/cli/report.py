"""`paceline report`: a run as one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path

from paceline.core.errors import DataError


def write_report(run_dir: Path) -> Path:
    """Not there yet."""
    raise DataError(f"no report of {run_dir} yet")
