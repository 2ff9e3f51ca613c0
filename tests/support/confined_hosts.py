"""What a confined program may not reach: a port and a socket of the host."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def listening() -> Iterator[tuple[int, str]]:
    """A TCP port and an abstract socket of the host that would accept."""
    name = f"paceline-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0" + name)
        abstract.listen()
        yield server.getsockname()[1], name
