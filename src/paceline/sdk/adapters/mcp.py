"""Makes an environment of an MCP server's tools, without a reward. Needs the package `mcp`, version 2."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.samples.chat import ToolSpec
from paceline.sdk.environment import Environment, Observation, environment_maker

_START_S = 30.0


def mcp_environment(server: Any, *, timeout_s: float = 30.0) -> Callable[[], Environment]:
    """Makes environments for `serve_environment` with the server's tools; each episode has a connection.

    Args:
        server: argument of `mcp.Client`: a URL, `StdioServerParameters` (a process per episode), or a server.
        timeout_s: deadline of each tool call.
    """

    return environment_maker("mcp", lambda: _Mcp(server, timeout_s))


class _Mcp(Environment):
    def __init__(self, server: Any, timeout_s: float) -> None:
        self._server, self._timeout_s = server, timeout_s
        self._ready: asyncio.Future[Any] | None = None
        self._done = asyncio.Event()
        self._connection: asyncio.Task[None] | None = None

    async def open(self, task: Mapping[str, Any], *, task_seed: int, episode_seed: int) -> Observation:
        self._ready = asyncio.get_running_loop().create_future()
        self._connection = asyncio.create_task(self._connect(self._ready), name="mcp")
        async with asyncio.timeout(_START_S):
            client = await self._ready
            listed = await client.list_tools()
        self.tools = {  # type: ignore[misc]  # of this instance only
            tool.name: (_spec(tool), self._timeout_s) for tool in listed.tools
        }
        return Observation()

    async def invoke(self, name: str, arguments: Mapping[str, object]) -> str:
        """Calls a tool of the server; returns the text of its answer.

        Raises:
            RuntimeError: the tool failed; its text says why.
        """
        assert self._ready is not None, "the episode is open"
        result = await self._ready.result().call_tool(name, dict(arguments))
        text = "\n".join(part.text for part in result.content if getattr(part, "text", None) is not None)
        if result.is_error:
            raise RuntimeError(text)
        return text

    async def release(self) -> None:
        self._done.set()
        if self._connection is not None:
            await asyncio.wait([self._connection], timeout=_START_S)

    async def _connect(self, ready: asyncio.Future[Any]) -> None:
        """Opens and closes the connection in one task, as the library requires."""
        try:
            from mcp import Client
        except ImportError as error:
            ready.set_exception(ConfigError(f"mcp_environment needs the package mcp: {error}"))
            return
        try:
            async with Client(self._server) as client:
                ready.set_result(client)
                await self._done.wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)


def _spec(tool: Any) -> ToolSpec:
    return ToolSpec(name=tool.name, description=tool.description or "", parameters=dict(tool.input_schema))
