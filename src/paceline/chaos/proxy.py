"""A TCP proxy on loopback whose connections can be slowed down, cut, or made to swallow everything."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Self

from paceline.service.tasks import cancel

_CHUNK_BYTES = 1 << 16
_CONNECT_S = 5.0


class Proxy:
    """Passes bytes on to `target`, which may be set after the start; use it as an async context manager.

    Attributes:
        target: host and port; a connection that comes before it is set is closed.
        delay_s: how long every chunk of bytes is withheld.
    """

    def __init__(self) -> None:
        self.target: tuple[str, int] | None = None
        self.delay_s = 0.0
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._passing: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        # Bound at once, because others learn the port before the proxy runs.
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, sock=self._socket)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        await cancel(*self._passing)

    @property
    def num_connections(self) -> int:
        """Number of connections whose bytes it passes on."""
        return len(self._writers) // 2

    def cut(self) -> None:
        """Cuts all connections; new ones are accepted."""
        for writer in self._writers:
            writer.transport.abort()

    def swallow(self) -> None:
        """Lets no byte arrive from now on, without an error for either side."""
        self._open.clear()

    def release(self) -> None:
        """Ends `swallow`: the withheld bytes arrive."""
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.target is None:
            writer.transport.abort()
            return
        try:
            async with asyncio.timeout(_CONNECT_S):
                far_reader, far_writer = await asyncio.open_connection(*self.target)
        except (OSError, TimeoutError):
            writer.transport.abort()
            return
        ends = (writer, far_writer)
        self._writers.update(ends)
        both = [
            asyncio.create_task(self._pass(reader, far_writer), name="proxy forth"),
            asyncio.create_task(self._pass(far_reader, writer), name="proxy back"),
        ]
        self._passing.update(both)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.transport.abort()
            await cancel(*both)
            self._writers.difference_update(ends)
            self._passing.difference_update(both)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(_CHUNK_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._open.wait()
                writer.write(chunk)
                await writer.drain()
