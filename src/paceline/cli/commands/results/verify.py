"""`paceline verify`: checks the records of a run against the invariants that Paceline promises."""

from __future__ import annotations

import argparse
import subprocess
import sys

from paceline.runs import run_dir as run_dirs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("run_name", metavar="RUN", help="run directory, or its name under runs/")


def run(args: argparse.Namespace) -> int:
    """Runs the controller's checker in another process: the command line imports no service."""
    folder = run_dirs.find(args.run_name)
    return subprocess.run(
        [sys.executable, "-m", "paceline.controller.verify", str(folder)], check=False
    ).returncode
