"""Injects one fault into a run that is under way; a fault that cannot be injected is an error."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psutil
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from paceline.cli.chaos.faults import CHILD, CONTROLLER, ENGINE, REDIS, Fault, FaultKind
from paceline.cli.chaos.proxy import Proxy
from paceline.cli.launch import run_dir as run_dirs
from paceline.core.errors import BrokerError, PeerLostError

_DELAY_S = 0.05
# How long a target may take to appear: it may just be starting again.
_TARGET_S = 60.0
_COMMAND_S = 10.0
# How the processes that a service starts are told apart from its other children.
_WORDS = {ENGINE: "EngineCore", CHILD: "paceline.reward"}


class Injector:
    """Injects faults into the run in `run_dir`.

    Its proxies stand between the members and Redis, and between the members and the controller.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.links = {REDIS: Proxy(), CONTROLLER: Proxy()}
        self._redis_url = ""

    def broker_url(self, url: str) -> str:
        """The address by which the services reach the Redis server at `url`."""
        self._redis_url, parts = url, urlsplit(url)
        self.links[REDIS].target = (str(parts.hostname), int(parts.port or 0))
        user = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
        return urlunsplit(parts._replace(netloc=f"{user}127.0.0.1:{self.links[REDIS].port}"))

    def controller_address(self, address: str) -> str:
        """The address by which members reach the controller at `address`."""
        host, _, port = address.rpartition(":")
        self.links[CONTROLLER].target = (host, int(port))
        return f"127.0.0.1:{self.links[CONTROLLER].port}"

    async def inject(self, fault: Fault) -> None:
        """Injects a fault and returns when it is over.

        Raises:
            PeerLostError: its target does not exist.
            BrokerError: the Redis server did not do what it was told.
        """
        match fault.kind:
            case FaultKind.KILL:
                (await self._find(fault.target)).kill()
            case FaultKind.PAUSE | FaultKind.LONG_PAUSE:
                await self._pause(await self._find(fault.target), fault.seconds)
            case FaultKind.LOSE_DATA:
                process = await self._find(REDIS)
                await self._tell(lambda server: server.flushall())
                process.kill()
            case FaultKind.FULL:
                await self._fill(fault.seconds)
            case FaultKind.CUT_CLIENTS:
                await self._tell(lambda server: server.client_kill_filter(_type="normal"))
            case FaultKind.FORGET_SCRIPTS:
                await self._tell(lambda server: server.script_flush())
            case _:
                await self._disturb(self.links[fault.target], fault)

    async def _find(self, target: str) -> psutil.Process:
        """The process that a target names."""
        deadline = asyncio.get_running_loop().time() + _TARGET_S
        while True:
            process = self._look(target)
            if process is not None:
                return process
            if asyncio.get_running_loop().time() > deadline:
                raise PeerLostError(f"no process {target} within {_TARGET_S:g} s", peer=target)
            await asyncio.sleep(0.1)

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
                    if _WORDS[part] in " ".join([child.name(), *child.cmdline()]):
                        return child
        return None

    async def _pause(self, process: psutil.Process, seconds: float) -> None:
        process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            # It may have been killed as hung. psutil refuses a later process with its id.
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
        """Sends a command past the proxy."""
        client = redis.Redis.from_url(
            self._redis_url, decode_responses=True, socket_timeout=_COMMAND_S, retry=Retry(NoBackoff(), 0)
        )
        with contextlib.closing(client):
            try:
                return await asyncio.to_thread(command, client)
            except redis.RedisError as error:
                raise BrokerError(f"the run's Redis server refused a fault: {error}") from error

    async def _disturb(self, link: Proxy, fault: Fault) -> None:
        if fault.kind is FaultKind.CUT:
            if not link.num_connections:
                raise PeerLostError(f"there are no connections to {fault.target} to cut", peer=fault.target)
            link.cut()
            return
        if fault.kind is FaultKind.DELAY:
            link.delay_s = _DELAY_S
        else:
            link.swallow()
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            link.delay_s = 0.0
            link.release()
