"""`paceline report`: a run as one self-contained HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.launch import run_dir as run_dirs
from paceline.core.errors import DataError
from paceline.service.process import write_atomically

NAME = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument(
        "run_name",
        nargs="?",
        metavar="RUN",
        help="run directory, or its name under runs/; default: the latest",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"where to write; default: RUN/{NAME}")


def run(args: argparse.Namespace) -> int:
    """Writes the page and prints its path."""
    print(write_report(run_dirs.find(args.run_name), args.out))
    return 0


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Writes the page of a run that has ended or is under way; returns its path.

    Raises:
        DataError: the folder holds no run.
    """
    from paceline.cli.report.data import read_run
    from paceline.cli.report.page import page

    if not any(
        (run_dir / name).exists() for name in ("metrics.jsonl", "events.jsonl", "config.resolved.yaml")
    ):
        raise DataError(f"{run_dir} holds no run (no metrics.jsonl); give a run directory")
    target = out or run_dir / NAME
    write_atomically(target, page(read_run(run_dir)))
    return target
