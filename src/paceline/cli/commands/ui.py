"""`paceline ui`: runs as pages in a browser, renewed while they train."""

from __future__ import annotations

import argparse
import asyncio
import secrets
from pathlib import Path

from paceline.cli.launch import run_dir as run_dirs
from paceline.cli.ui.runs import ServedRuns
from paceline.cli.ui.server import HOST, PageServer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument(
        "folder",
        nargs="?",
        metavar="RUN|DIR",
        help="a run directory, a name under runs/, or a folder of runs (default: runs/)",
    )
    parser.add_argument(
        "--port", type=int, default=7080, help="on 127.0.0.1 (default: %(default)s; 0: a free one)"
    )


def run(args: argparse.Namespace) -> int:
    """Serves until Ctrl-C; returns the exit code."""
    is_all = args.folder is None and run_dirs.RUNS.is_dir()
    folder = run_dirs.RUNS.resolve() if is_all else run_dirs.find(args.folder)
    return asyncio.run(_serve(folder, args.port))


async def _serve(folder: Path, port: int) -> int:
    token = secrets.token_urlsafe(16)
    server = await PageServer(ServedRuns(folder), token).start(port)
    port = server.sockets[0].getsockname()[1]
    print(
        f"{folder}, read only, at\n  http://{HOST}:{port}/{token}/\n"
        f"from another machine: ssh -L {port}:{HOST}:{port} THIS_HOST, then the same address; Ctrl-C ends it",
        flush=True,
    )
    async with server:
        await server.serve_forever()
    return 0
