"""The processes of a run: starts them, reports those that end, stops them in order and leaves none behind."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paceline.launch.planning.plan import ProcessSpec, Role
from paceline.launch.processes import spawn
from paceline.launch.processes.forking import Forking
from paceline.launch.processes.spawn import ManagedProcess
from paceline.service.tasks import cancel

# Consumers end before their producers. The controller ends last, so that every member can tell it when
# leaving.
STOP_ORDER = (Role.ROLLOUT, Role.LEARNER, Role.REWARD, Role.REWARD_MODEL, Role.CONTROLLER)


class ProcessTree:
    """The processes of one run, all with `env`. Child processes that existed before are left alone.

    If a fork server (`fork_server.begin`) runs, services start as its forks until `end_forking`.
    """

    def __init__(self, log_dir: Path, *, env: Mapping[str, str] = MappingProxyType({})) -> None:
        self._log_dir, self._env = log_dir, env
        self._before = spawn.descendants()
        self._forking = Forking.begun()
        self._processes: list[ManagedProcess] = []
        self._ended: asyncio.Queue[ManagedProcess] = asyncio.Queue()
        self._hurry = asyncio.Event()

    @property
    def pids(self) -> dict[str, int]:
        """The ids of the processes that run, by name."""
        return {process.name: process.pid for process in self._processes}

    async def start(self, spec: ProcessSpec, secrets: Mapping[str, str]) -> ManagedProcess:
        """Starts a process, which logs to LOG_DIR/NAME.log."""
        process = await self._start(spec, secrets)
        process.exited.add_done_callback(lambda _: self._ended.put_nowait(process))
        return process

    def end_forking(self) -> None:
        """Starts every further process as a program instead of a fork."""
        forking, self._forking = self._forking, None
        if forking is not None:
            forking.close()

    async def next_exit(self) -> ManagedProcess:
        """Waits for the end of a process that was not reported yet, and removes the process from the run.

        Kills the processes that it had started: orphans hold connections on which others would wait.
        """
        process = await self._ended.get()
        self._remove(process)
        return process

    async def run(self, spec: ProcessSpec) -> ManagedProcess:
        """Starts a process that ends by itself, waits for its end, and removes it from the run."""
        process = await self._start(spec, {})
        await asyncio.shield(process.exited)
        self._remove(process)
        return process

    async def _start(self, spec: ProcessSpec, secrets: Mapping[str, str]) -> ManagedProcess:
        process = await spawn.start(
            spec, self._log_dir / f"{spec.name}.log", {**self._env, **secrets}, self._forking
        )
        self._processes.append(process)
        return process

    def _remove(self, process: ManagedProcess) -> None:
        """Ends the process's children at once: later, other processes may have their ids."""
        process.kill_family()
        if process in self._processes:
            self._processes.remove(process)

    def running(self, role: Role) -> list[ManagedProcess]:
        """Returns the processes of a role that have not ended."""
        return [p for p in self._processes if p.spec.role is role and p.running]

    @property
    def hurried(self) -> bool:
        """Whether `stop` must kill at once."""
        return self._hurry.is_set()

    def hurry(self) -> None:
        """Makes `stop` kill the remaining processes at once."""
        self._hurry.set()

    async def stop(self, *, budget_s: float) -> list[str]:
        """Ends all processes, role by role, in about `budget_s` seconds; returns the names of the killed.

        A role may use the time that earlier roles left; a tenth of the budget is kept for each later role.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + budget_s
        killed: list[str] = []
        for position, role in enumerate(STOP_ORDER):
            reserved_s = 0.1 * budget_s * (len(STOP_ORDER) - position - 1)
            share_s = max(0.0, deadline - loop.time() - reserved_s)
            group = [p for p in self._processes if p.spec.role is role]
            killed += await self._stop_group(group, share_s)
        return killed

    def sweep(self) -> list[str]:
        """Kills the remaining child processes by pid; returns a description of each."""
        now = spawn.descendants()
        return spawn.kill_all(process for pid, process in now.items() if pid not in self._before)

    async def _stop_group(self, group: Sequence[ManagedProcess], budget_s: float) -> list[str]:
        for process in group:
            process.terminate()
        await self._wait_for([process.exited for process in group if process.running], budget_s)
        late = [process for process in group if process.running]
        for process in group:
            # Even if the leader has ended: the rest of its group must not outlive it.
            process.signal_group(signal.SIGKILL)
        if late:
            await asyncio.wait([process.exited for process in late], timeout=5)
        return [process.name for process in late]

    async def _wait_for(self, ends: Sequence[asyncio.Task[int]], budget_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + budget_s
        hurry: asyncio.Task[bool] = asyncio.create_task(self._hurry.wait(), name="hurry")
        try:
            pending = {end for end in ends if not end.done()}
            while pending and not hurry.done() and loop.time() < deadline:
                watched: set[asyncio.Task[Any]] = {*pending, hurry}
                await asyncio.wait(
                    watched, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED
                )
                pending = {end for end in pending if not end.done()}
        finally:
            await cancel(hurry)
