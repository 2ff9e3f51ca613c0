"""`paceline profile`: writes the recorded steps of a run and the services' spans to one file for Perfetto."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.commands import arguments
from paceline.runs import run_dir as run_dirs
from paceline.show.report.trace import FILE_NAME, write_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    arguments.add_run(parser)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"file to write (default: RUN/profile/{FILE_NAME})"
    )


def run(args: argparse.Namespace) -> int:
    """Writes the file and prints its path."""
    print(f"{write_trace(run_dirs.find(args.run_name), args.out)}  (open it at https://ui.perfetto.dev)")
    return 0
