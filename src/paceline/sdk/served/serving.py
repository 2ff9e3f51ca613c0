"""What the SDK's servers share: where they listen, who may call, and their end by a signal."""

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
        what: it serves: "reward", "environment".
        host, port: where to listen; port 0 takes any free one.
        credentials: those of the environment.
        token: what callers must carry, in place of the environment's.
    """

    def __init__(
        self, what: str, *, host: str, port: int, credentials: Credentials, token: str | None
    ) -> None:
        self._what, self._host, self._port = what, host, port
        outside = credentials.for_outside_callers()
        self._credentials = outside if token is None else outside.with_token(token)
        self._running: RunningServer | None = None

    @property
    def address(self) -> str:
        """host:port that callers reach; known once it has started."""
        if self._running is None:
            raise RuntimeError(f"the {self._what} server has not been started")
        return self._running.address

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Begins to listen for calls of the run.

        Raises:
            ConfigError: no token on an address that other machines reach.
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
        """Gives calls under way two seconds, then stops."""
        if self._running is not None:
            await self._running.stop()

    def _service(self) -> tuple[Callable[..., None], Any]:
        """The function that adds the servicer to a server, and the servicer."""
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
