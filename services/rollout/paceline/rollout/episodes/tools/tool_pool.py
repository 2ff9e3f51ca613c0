"""Calls plain Python functions as tools in child processes, with limits of time and memory per call.

If a call hangs, raises an error, crashes or cannot be made, the policy gets a sentence that begins with
"error:", because its arguments may be the cause. Only a process that cannot be replaced loses the episode.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from paceline.core.errors import PacelineError, ProtocolError
from paceline.core.samples.chat import Message, ToolCall, ToolSpec
from paceline.rollout.episodes.environment import (
    EnvironmentLostError,
    EpisodeTask,
    Grade,
    Opening,
    TurnResult,
)
from paceline.service.children import frames
from paceline.service.children.process import ChildLimits, ChildProcess

log = logging.getLogger(__name__)

CHILD_MODULE = "paceline.rollout.episodes.tools.tool_child"


class ToolPool:
    """An `EpisodeEnvironment` whose episodes end with the first turn without a tool call; it gives no reward.

    Args:
        references: `module:function` or `path/to/file.py:function`.
        call_s: longest time of a call in seconds.
        memory_bytes: most memory of a process.
    """

    def __init__(
        self, references: Sequence[str], *, call_s: float, memory_bytes: int, num_processes: int
    ) -> None:
        self._references, self._call_s = tuple(references), call_s
        self._limits, self._num_processes = ChildLimits(memory_bytes=memory_bytes), num_processes
        self._idle: asyncio.Queue[ChildProcess | None] = asyncio.Queue()
        self._children: set[ChildProcess] = set()
        self._specs: tuple[ToolSpec, ...] = ()
        self.call_names: Sequence[str] = ()

    async def start(self) -> None:
        """Starts one process, which describes the tools; the others start when they are needed.

        Raises:
            ConfigError: a function cannot be found, imported or described.
            DeadlineError, PeerLostError: a process hung or died while importing.
        """
        child = await self._start_child()
        self._specs = tuple(ToolSpec(**spec) for spec in child.description)
        self.call_names = [spec.name for spec in self._specs]
        self._idle.put_nowait(child)
        for _ in range(self._num_processes - 1):
            self._idle.put_nowait(None)

    async def close(self) -> None:
        """Ends all processes, whatever they are doing."""
        children, self._children = self._children, set()
        for child in children:
            await self._end(child)

    def session(self, task: EpisodeTask) -> ToolSession:
        """Returns a session; all sessions share the processes."""
        return ToolSession(self, self._specs)

    async def call(self, call: ToolCall) -> tuple[str, float]:
        """Returns a tool's answer, or "error:" and the reason; and the seconds of the call, without waiting.

        Raises:
            EnvironmentLostError: a process cannot be started.
        """
        problem = call.problem or self._unknown(call.name)
        if problem:
            return f"error: {problem}", 0.0
        try:
            frame = frames.encode([call.name, dict(call.arguments)])
        except (TypeError, ValueError, OverflowError) as error:
            return f"error: the arguments cannot be passed on: {error}", 0.0
        child = await self._idle.get()
        try:
            child = child or await self._replacement()
        except BaseException as error:
            # Frees the slot, even if the episode was given up meanwhile.
            self._idle.put_nowait(None)
            if not isinstance(error, PacelineError):
                raise
            raise EnvironmentLostError(
                f"a tool process does not start: {error}", peer="tool process"
            ) from error
        is_sound, began = False, time.monotonic()
        try:
            async with asyncio.timeout(self._call_s):
                await child.send(frame)
                is_ok, text = await child.receive()
            is_sound = True
            answer = str(text) if is_ok else f"error: {text}"
        except TimeoutError:
            answer = f"error: the tool did not answer within {self._call_s:g} s"
        except (EOFError, ConnectionError, ProtocolError, ValueError, TypeError):
            await self._end(child)
            answer = f"error: the tool's process ended: {child.describe_exit()}"
        finally:
            # A process that has not answered is in an unknown state, even if only the episode was given up.
            if not is_sound:
                child.kill()
            self._idle.put_nowait(child if is_sound else None)
        return answer, time.monotonic() - began

    async def _start_child(self) -> ChildProcess:
        setup, imports = list(self._references), ", ".join(self._references)
        child = await ChildProcess.start(
            CHILD_MODULE, setup, role="tool", imports=imports, limits=self._limits
        )
        self._children.add(child)
        return child

    async def _replacement(self) -> ChildProcess:
        """Starts a new process; first waits for the end of killed ones."""
        for child in [child for child in self._children if child.exited]:
            await self._end(child)
        return await self._start_child()

    async def _end(self, child: ChildProcess) -> None:
        self._children.discard(child)
        try:
            await child.stop()
        except PacelineError as error:
            log.warning("%s", error)
        child.release()

    def _unknown(self, name: str) -> str:
        if name in self.call_names:
            return ""
        return f"there is no tool {name[:80]!r}; there are {', '.join(self.call_names)}"


class ToolSession:
    """One episode with the pool's tools; it keeps nothing between calls."""

    def __init__(self, pool: ToolPool, specs: tuple[ToolSpec, ...]) -> None:
        self._pool, self._specs = pool, specs

    async def open(self) -> Opening:
        """Returns the tools; the prompt comes from the data."""
        return Opening(tools=self._specs)

    async def step(self, turn: int, action: Message) -> TurnResult:
        """Makes the turn's calls one after the other; a turn without calls is the answer."""
        messages, seconds = [], 0.0
        for call in action.tool_calls:
            text, call_s = await self._pool.call(call)
            seconds += call_s
            messages.append(Message(role="tool", content=text, name=call.name, call_id=call.call_id))
        return TurnResult(
            messages=tuple(messages), seconds=seconds, stop_reason="" if messages else "answered"
        )

    async def close(self, stop_reason: str) -> Grade:
        """Returns no reward, because tools give none."""
        return Grade()

    async def abandon(self) -> None:
        """Does nothing: tools hold nothing."""
