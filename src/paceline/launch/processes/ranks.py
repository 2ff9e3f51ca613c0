"""Runs a module once per rank until all ranks have ended, as torchrun does on one machine."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import PeerLostError
from paceline.launch.planning.plan import KEEP_MEMORY, ProcessSpec, Role, torchrun_env
from paceline.launch.processes.process_tree import ProcessTree
from paceline.launch.processes.spawn import ManagedProcess
from paceline.service.process import adopt_orphans
from paceline.sizing.machine import free_port, num_cores
from paceline.storage.hub import OFFLINE


def run_ranks(
    module: str, arguments: Sequence[str], *, world_size: int, num_threads: int | None, log_dir: Path
) -> None:
    """Runs `python -m module` on every rank; prints the output of rank 0.

    Raises:
        PeerLostError: a rank failed; its last error is in the message.
    """
    asyncio.run(_run(module, arguments, world_size, num_threads, log_dir))


async def _run(
    module: str, arguments: Sequence[str], world_size: int, num_threads: int | None, log_dir: Path
) -> None:
    adopt_orphans()
    tree = ProcessTree(log_dir)
    port = free_port()
    variables = thread_variables(num_threads, world_size)
    command = (sys.executable, "-m", module, *arguments)
    started: list[ManagedProcess] = []
    echo: asyncio.Task[None] | None = None
    try:
        for rank in range(world_size):
            env = KEEP_MEMORY | torchrun_env(rank=rank, world_size=world_size, master_port=port)
            env |= {**variables, "PYTHONUNBUFFERED": "1", OFFLINE: "1"}
            spec = ProcessSpec(name=f"rank-{rank}", role=Role.LEARNER, command=command, env=env)
            started.append(await tree.start(spec, {}))
        echo = asyncio.create_task(_echo(started[0]), name="echo of rank 0")
        for _ in started:
            process = await tree.next_exit()
            if process.exited.result() != 0:
                raise PeerLostError(process.describe_end("failed"), peer=process.name)
    finally:
        await tree.stop(budget_s=5.0)
        tree.sweep()
        if echo is not None:
            await echo


def thread_variables(num_threads: int | None, world_size: int) -> dict[str, str]:
    """Returns a rank's OpenMP variables: the configured threads, else the user's, else its share of cores.

    Waiting threads sleep: if other processes run, too, spinning threads cost a rank its cores.
    """
    own = os.environ.get("OMP_NUM_THREADS", "")
    threads = num_threads or own or max(1, num_cores() // world_size)
    return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}


async def _echo(process: ManagedProcess) -> None:
    """Prints what is appended to the log. It polls, because a file does not report that it has grown."""
    with process.log_path.open("rb") as log:
        log.seek(process.log_start)
        while True:
            ended = not process.running
            text = log.read()
            if text:
                os.write(sys.stdout.fileno(), text)
            if ended:
                return
            await asyncio.sleep(0.2)
