"""`paceline ui`: runs as pages in a browser, renewed while they train."""

from __future__ import annotations

import argparse
import asyncio
import secrets
from pathlib import Path

from paceline.cli.launch import run_dir as run_dirs
from paceline.cli.ui.runs import ServedRuns
from paceline.cli.ui.server import PageApp
from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.service.addresses import to_bind
from paceline.service.connection import is_loopback
from paceline.service.credentials import INSECURE, TLS_DIR, Credentials
from paceline.service.http_server import HttpServer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument(
        "folder",
        nargs="?",
        metavar="RUN|DIR",
        help="a run directory, a name under runs/, or a folder of runs (default: runs/)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=7080, help="to listen on (default: %(default)s; 0: a free one)"
    )


def run(args: argparse.Namespace) -> int:
    """Serves until Ctrl-C; returns the exit code."""
    is_all = args.folder is None and run_dirs.RUNS.is_dir()
    folder = run_dirs.RUNS.resolve() if is_all else run_dirs.find(args.folder)
    return asyncio.run(_serve(folder, args.host, args.port))


async def _serve(folder: Path, host: str, port: int) -> int:
    token = secrets.token_urlsafe(16)
    app = PageApp(ServedRuns(folder, asyncio.get_running_loop()), token)
    server = open_server(app, host, port)
    port, scheme = server.server_port, "http" if server.is_plain else "https"
    print(f"{folder}, read only, at\n  {scheme}://{host}:{port}/{token}/", flush=True)
    if is_loopback(host):
        print(f"from another machine: ssh -L {port}:{host}:{port} THIS_HOST, then the same address; ", end="")
    print("Ctrl-C ends it", flush=True)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        server.close()
    return 0


def open_server(app: PageApp, host: str, port: int) -> HttpServer:
    """Listens; beyond loopback over TLS.

    Raises:
        ConfigError: other machines would get the pages in plain text.
        EnvironmentLackError: the port is taken, or the address is not this machine's.
    """
    credentials = Credentials.from_env()
    if not is_loopback(host) and credentials.tls is None and not credentials.insecure:
        raise ConfigError(
            f"refusing to serve runs on {host} in plain text, secret address and all: set {TLS_DIR} to what "
            f"`paceline certs issue` writes, or leave --host out and use ssh -L, or, on a network that may "
            f"see them, set {INSECURE}=1"
        )
    tls = None if is_loopback(host) else credentials.tls
    try:
        # Browsers have no certificate of the run; the address has a token.
        return HttpServer(to_bind(host), port, app, tls, asks_callers=False)
    except OSError as error:
        raise EnvironmentLackError(
            f"cannot listen on {host}:{port} ({error.strerror}); give another --port, or 0 for a free one"
        ) from error
