"""`paceline report`: writes a run as one self-contained HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.commands import arguments
from paceline.runs import run_dir as run_dirs
from paceline.show.report.write import FILE_NAME, write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    arguments.add_run(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"file to write (default: RUN/{FILE_NAME})")


def run(args: argparse.Namespace) -> int:
    """Writes the page and prints its path."""
    print(write_report(run_dirs.find(args.run_name), args.out))
    return 0
