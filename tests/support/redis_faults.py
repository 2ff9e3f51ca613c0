"""Faults of a real Redis server, and the notices that a broker gives of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.broker import Broker, open_broker
from paceline.broker.redis.redis_server import RedisServer, find_server


class Notices(list[str]):
    """What a client said about its server."""

    async def wait_for(self, count: int) -> None:
        """Returns when there are so many."""
        async with asyncio.timeout(120):
            while len(self) < count:  # noqa: ASYNC110 - a list has no event for it
                await asyncio.sleep(0.02)

    def open(self, url: str, **options: float) -> Broker:
        """A broker that tells it."""
        return open_broker(url, on_outage=self.append, on_recovery=self.append, **options)


def kill(server: RedisServer) -> None:
    """Kills the server's process and waits for its end."""
    os.kill(server.pid, signal.SIGKILL)
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)


@contextmanager
def unix_server(folder: Path, *options: str) -> Iterator[Path]:
    """A server on a socket in the folder, without a password; yields the socket's path."""
    folder.mkdir(exist_ok=True)
    path = folder / "redis.sock"
    path.unlink(missing_ok=True)
    command = [str(find_server()), "--port", "0", "--unixsocket", str(path), "--dir", str(folder)]
    process = subprocess.Popen([*command, "--save", "", *options], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 40
        with socket.socket(socket.AF_UNIX) as probe:
            while probe.connect_ex(str(path)):
                assert time.monotonic() < deadline, "the server does not listen"
                time.sleep(0.01)
        yield path
    finally:
        process.kill()
        process.wait()
