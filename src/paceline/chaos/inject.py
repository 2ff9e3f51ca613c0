"""Injects one fault into a running run; a fault that cannot be injected is an error."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psutil
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from paceline.chaos.faults import CHILD, CONTROLLER, ENGINE, REDIS, Fault, FaultKind
from paceline.chaos.proxy import Proxy
from paceline.core.errors import BrokerError, PeerLostError
from paceline.runs import run_dir as run_dirs

_DELAY_S = 0.05
_LOOK_S = 0.1
_COMMAND_S = 10.0
# Identifies the processes of the reward service among its children.
_CHILD_WORD = "paceline.reward"


class Injector:
    """Injects faults into the run in `run_dir`.

    Its proxies stand between the members and Redis, and between the members and the controller.

    Args:
        engine_words: identify the processes of the run's engines (`EngineFacts.process_word`).
    """

    def __init__(self, run_dir: Path, engine_words: Sequence[str]) -> None:
        self._run_dir = run_dir
        self._words = {ENGINE: engine_words, CHILD: (_CHILD_WORD,)}
        self.links = {REDIS: Proxy(), CONTROLLER: Proxy()}
        self._redis_url = ""

    def broker_url(self, url: str) -> str:
        """Returns the address by which the services reach the Redis server at `url`."""
        self._redis_url, parts = url, urlsplit(url)
        self.links[REDIS].target = (str(parts.hostname), int(parts.port or 0))
        user = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
        return urlunsplit(parts._replace(netloc=f"{user}127.0.0.1:{self.links[REDIS].port}"))

    def controller_address(self, address: str) -> str:
        """Returns the address by which members reach the controller at `address`."""
        host, _, port = address.rpartition(":")
        self.links[CONTROLLER].target = (host, int(port))
        return f"127.0.0.1:{self.links[CONTROLLER].port}"

    async def aim(self, fault: Fault, *, within_s: float) -> Callable[[], Awaitable[Any]]:
        """Finds a fault's target, which may just be restarting; returns a function that injects the fault.

        That function returns when the fault is over, and raises BrokerError if the Redis server refuses a
        command.

        Raises:
            PeerLostError: there is no such target within `within_s` seconds.
        """
        deadline = asyncio.get_running_loop().time() + within_s
        while (act := self._take_aim(fault)) is None:
            if asyncio.get_running_loop().time() > deadline:
                raise PeerLostError(
                    f"{fault}: there is no such process or connection within {within_s:g} s",
                    peer=fault.target,
                )
            await asyncio.sleep(_LOOK_S)
        return act

    def pid_of(self, target: str) -> int | None:
        """Returns the process id of a target's service, as recorded by the launcher."""
        note = run_dirs.read_note(self._run_dir)
        return note.pids.get(target.partition("/")[0]) if note is not None else None

    def _take_aim(self, fault: Fault) -> Callable[[], Awaitable[Any]] | None:
        link = self.links.get(fault.target)
        if fault.kind is FaultKind.CUT and link is not None:
            return functools.partial(self._cut, link) if link.num_connections else None
        if fault.kind in (FaultKind.DELAY, FaultKind.HOLE, FaultKind.LONG_HOLE) and link is not None:
            return functools.partial(self._disturb, link, fault)
        process = self._look(fault.target)
        if process is None:
            return None
        match fault.kind:
            case FaultKind.KILL:
                return functools.partial(self._kill, process)
            case FaultKind.LOSE_DATA:
                return functools.partial(self._lose_data, process)
            case FaultKind.FULL:
                return functools.partial(self._fill, fault.seconds)
            case FaultKind.CUT_CLIENTS:
                return functools.partial(self._tell, lambda server: server.client_kill_filter(_type="normal"))
            case FaultKind.FORGET_SCRIPTS:
                return functools.partial(self._tell, lambda server: server.script_flush())
            case _:
                return functools.partial(self._pause, process, fault.seconds)

    def _look(self, target: str) -> psutil.Process | None:
        name, _, part = target.partition("/")
        note = run_dirs.read_note(self._run_dir)
        pid = note.pids.get(name) if note is not None else None
        if pid is None:
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if not part:
                return process if process.status() != psutil.STATUS_ZOMBIE else None
            for child in process.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    line = " ".join([child.name(), *child.cmdline()])
                    if any(word in line for word in self._words[part]):
                        return child
        return None

    async def _kill(self, process: psutil.Process) -> None:
        # The process may have ended since, with the same result.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()

    async def _lose_data(self, process: psutil.Process) -> None:
        await self._tell(lambda server: server.flushall())
        await self._kill(process)

    async def _cut(self, link: Proxy) -> None:
        link.cut()

    async def _pause(self, process: psutil.Process, seconds: float) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            # The process may have been killed as hung. psutil refuses a later process with the same id.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)

    async def _fill(self, seconds: float) -> None:
        """Lowers the memory limit below what is in use."""
        before = await self._tell(lambda server: server.config_get("maxmemory"))
        await self._tell(lambda server: server.config_set("maxmemory", 1))
        try:
            await asyncio.sleep(seconds)
        finally:
            await self._tell(lambda server: server.config_set("maxmemory", before["maxmemory"]))

    async def _tell(self, command: Callable[[redis.Redis], Any]) -> Any:
        """Sends a command, not through the proxy; repeats it while the server restarts."""
        deadline = asyncio.get_running_loop().time() + _COMMAND_S
        while True:
            client = redis.Redis.from_url(
                self._redis_url, decode_responses=True, socket_timeout=_COMMAND_S, retry=Retry(NoBackoff(), 0)
            )
            with contextlib.closing(client):
                try:
                    return await asyncio.to_thread(command, client)
                except redis.RedisError as error:
                    if asyncio.get_running_loop().time() > deadline:
                        raise BrokerError(f"the run's Redis server refused a fault: {error}") from error
            await asyncio.sleep(_LOOK_S)

    async def _disturb(self, link: Proxy, fault: Fault) -> None:
        if fault.kind is FaultKind.DELAY:
            link.delay_s = _DELAY_S
        else:
            link.swallow()
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            link.delay_s = 0.0
            link.release()
