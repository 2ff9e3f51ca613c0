"""`paceline ui`: shows runs as pages in a browser, and updates them while they train."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from paceline.runs import run_dir as run_dirs
from paceline.show.ui.serve import Listen, add_listen, serving

_PREFIX = "--"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument(
        "folder",
        nargs="?",
        metavar="RUN|DIR",
        help="a run directory, a name under runs/, or a folder of runs (default: runs/)",
    )
    add_listen(parser, _PREFIX)


def run(args: argparse.Namespace) -> int:
    """Serves until Ctrl-C; returns the exit code."""
    is_all = args.folder is None and run_dirs.RUNS.is_dir()
    folder = run_dirs.RUNS.resolve() if is_all else run_dirs.find(args.folder)
    return asyncio.run(_serve(folder, Listen.of(args, _PREFIX)))


async def _serve(folder: Path, listen: Listen) -> int:
    loop = asyncio.get_running_loop()
    with serving(folder, listen, loop) as words:
        print(f"{words}; Ctrl-C ends it", flush=True)
        await loop.create_future()
    return 0
