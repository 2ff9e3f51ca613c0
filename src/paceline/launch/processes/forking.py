"""The launcher's side of the fork server: starts services through it while a run starts."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceline.launch.planning.plan import ProcessSpec
from paceline.launch.processes import fork_server
from paceline.launch.processes.fork_server import Begun

log = logging.getLogger(__name__)

IMPORTS: Final[Mapping[str, tuple[str, ...]]] = {
    "paceline.controller": (),
    "paceline.reward": (),
    "paceline.reward.check": (),
    "paceline.rollout": (),
    # All ranks import these, so the server imports them once, after it has forked the services above.
    "paceline.learner": ("paceline.learner.app",),
    "paceline.learner.check": (),
}
"""The modules that are started as forks, and the modules that the server imports first for each."""

_START_S = 300.0


class Forking:
    """Starts services as forks until it is closed."""

    def __init__(self, server: Begun) -> None:
        self._server: Begun | None = server
        server.orders.setblocking(False)
        self._turn = asyncio.Lock()

    @classmethod
    def begun(cls) -> Forking | None:
        """Starts services through the fork server that this command has begun; None if it has begun none."""
        server = fork_server.begun()
        return None if server is None else cls(server)

    async def start(self, spec: ProcessSpec, log_path: Path, environ: Mapping[str, str]) -> int | None:
        """Starts a service; returns its process id, or None if it must be started as a program."""
        interpreter, option, *command = spec.command if len(spec.command) > 2 else ("", "")
        if spec.shell or (interpreter, option) != (sys.executable, "-m") or command[0] not in IMPORTS:
            return None
        order = {
            "command": command,
            "imports": IMPORTS[command[0]],
            "env": dict(environ),
            "log": str(log_path),
        }
        async with self._turn:
            answer = await self._ask(order)
        if "pid" in answer:
            return int(answer["pid"])
        log.info("%s is not forked: %s", spec.name, answer["error"])
        return None

    async def _ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        if self._server is None:
            return {"error": "the fork server has ended"}
        loop, orders = asyncio.get_running_loop(), self._server.orders
        line = b""
        try:
            async with asyncio.timeout(_START_S):
                await loop.sock_sendall(orders, json.dumps(order).encode() + b"\n")
                while not line.endswith(b"\n"):
                    received = await loop.sock_recv(orders, 1 << 16)
                    if not received:
                        raise ConnectionResetError("the fork server has ended")
                    line += received
        except TimeoutError:
            return {"error": f"the fork server has not answered within {_START_S:g} s"}
        except OSError as error:
            return {"error": str(error)}
        finally:
            if not line.endswith(b"\n"):
                self.close()  # what it answers later would be taken for the answer to another order
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends the server; the services that it has started go on."""
        if self._server is not None:
            self._server = None
            fork_server.end()
