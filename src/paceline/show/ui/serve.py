"""Opens the pages of runs to browsers, for `paceline ui` and `paceline train --ui`."""

from __future__ import annotations

import argparse
import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.service.addresses import is_loopback, to_bind
from paceline.service.identity.credentials import INSECURE, TLS_DIR, Credentials
from paceline.service.observability.http_server import HttpServer
from paceline.show.ui.runs import ServedRuns
from paceline.show.ui.server import PageApp


@dataclass(frozen=True, kw_only=True, slots=True)
class Listen:
    """Where pages are served; port 0 is a free one. `prefix` is that of the options, for messages."""

    host: str
    port: int
    prefix: str

    @classmethod
    def of(cls, args: argparse.Namespace, prefix: str) -> Listen:
        """Reads the address from the options that `add_listen` has added."""
        name = prefix.removeprefix("--").replace("-", "_")
        return cls(host=getattr(args, f"{name}host"), port=getattr(args, f"{name}port"), prefix=prefix)


def add_listen(parser: argparse.ArgumentParser, prefix: str) -> None:
    """Adds the options of an address, such as --host for the prefix "--"."""
    parser.add_argument(
        f"{prefix}host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        f"{prefix}port",
        type=int,
        default=7080,
        help="port to listen on (default: %(default)s; 0: a free one)",
    )


@contextmanager
def serving(folder: Path, listen: Listen, loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    """Serves the run in a folder, or the runs below it, while the block lasts; yields a text with the
    address.

    Args:
        folder: the folder, which may be created later.
        loop: asks the runs' controllers.

    Raises:
        ConfigError, EnvironmentLackError: see `open_server`.
    """
    token = secrets.token_urlsafe(16)
    server = open_server(PageApp(ServedRuns(folder, loop), token), listen)
    host, port, scheme = listen.host, server.server_port, "http" if server.is_plain else "https"
    words = f"{folder}, read only, at\n  {scheme}://{host}:{port}/{token}/"
    if is_loopback(host):
        words += f"\nfrom another machine: ssh -L {port}:{host}:{port} THIS_HOST, then the same address"
    try:
        yield words
    finally:
        server.close()


def open_server(app: PageApp, listen: Listen) -> HttpServer:
    """Listens; beyond loopback over TLS.

    Raises:
        ConfigError: other machines would get the pages in plain text.
        EnvironmentLackError: the port is taken, or the address is not this machine's.
    """
    credentials, host, port, prefix = Credentials.from_env(), listen.host, listen.port, listen.prefix
    if not is_loopback(host) and credentials.tls is None and not credentials.insecure:
        raise ConfigError(
            f"refusing to serve runs and their secret address on {host} in plain text: set {TLS_DIR} to the "
            f"folder that `paceline certs issue` writes, or leave {prefix}host out and use ssh -L, or, on a "
            "network that "
            f"may see them, set {INSECURE}=1"
        )
    tls = None if is_loopback(host) else credentials.tls
    try:
        # Browsers have no certificate of the run, so the address contains a token.
        return HttpServer(to_bind(host), port, app, tls, asks_callers=False)
    except OSError as error:
        raise EnvironmentLackError(
            f"cannot listen on {host}:{port} ({error.strerror}); give another {prefix}port, or 0 for a free "
            "one"
        ) from error
