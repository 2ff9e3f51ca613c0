"""Base of the SDK's servers: address, access and shutdown by a signal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Self

from paceline.service.grpc.server import RunningServer, start_server
from paceline.service.identity.credentials import Credentials
from paceline.service.member.runtime import ServiceContext, run_service


class Served:
    """A server of the SDK; an async context manager.

    Args:
        what: what it serves: "reward" or "environment".
        host, port: where to listen; port 0 takes any free one.
        credentials: the token that callers must send, and the files for TLS.
    """

    def __init__(self, what: str, *, host: str, port: int, credentials: Credentials) -> None:
        self._what, self._host, self._port = what, host, port
        self._credentials = credentials.for_outside_callers()
        self._running: RunningServer | None = None

    @property
    def address(self) -> str:
        """The host:port for callers; known once the server has started."""
        if self._running is None:
            raise RuntimeError(f"the {self._what} server has not been started")
        return self._running.address

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Begins to listen for calls of a run.

        Raises:
            ConfigError: there is no token, and other machines can reach the address.
            EnvironmentLackError: the port is taken.
        """
        add, servicer = self._service()
        self._running = await start_server(
            add,
            servicer,
            host=self._host,
            port=self._port,
            credentials=self._credentials,
            port_key=f"the port argument of serve_{self._what}",
        )

    async def stop(self) -> None:
        """Waits two seconds for calls under way, then stops."""
        if self._running is not None:
            await self._running.stop()

    def _service(self) -> tuple[Callable[..., None], Any]:
        """Returns the function that adds the servicer to a server, and the servicer."""
        raise NotImplementedError


def serve_until_signal(make: Callable[[], Served], what: str) -> None:
    """Serves until SIGINT or SIGTERM.

    Raises:
        SystemExit: the server could not start; the reason is in the log on standard error.
    """

    async def serve(context: ServiceContext) -> None:
        server = make()
        await server.start()
        context.defer(f"{what} server", server.stop)
        print(f"{what} server on {server.address}", file=sys.stderr, flush=True)
        await context.stopping.wait()

    code = run_service(serve, name=f"{what}-server")
    if code:
        raise SystemExit(code)
