"""`python -m paceline.launch.container MODULE [ARGUMENT ...]`: runs a service as a container's process.

Runs the module once, or once per rank if torchrun's PET_NPROC_PER_NODE is set, until a process ends; then the
others are ended, too. PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT span several hosts, as
for torchrun.

With PACELINE_GPU_SHARE=N the service uses the Nth share (from 0) of the GPUs in CUDA_VISIBLE_DEVICES; a share
has PACELINE_GPUS_PER_SERVER GPUs (default 1). A container without a share has nothing to do and ends with 0.

The exit code is that of the service: 0, 1, 2 or 3 by `core.errors.exit_code`, or 128 + N after signal N. A
service that shuts down on SIGTERM before the run is over has the exit code 143. Container engines restart a
container after every code but 0. With PACELINE_ENGINE_RESTARTS=1, which suits the policy `on-failure`, a
failure that a restart cannot fix has the exit code 0 and a line in the log.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence

from paceline.core.errors import EXIT_FAILED, ConfigError
from paceline.launch.processes.restarts import End, judge
from paceline.service.member.runtime import EXIT_INTERRUPTED
from paceline.service.packages import own_version
from paceline.service.process import DIE_WITH_PARENT, PARENT_PID
from paceline.sizing.machine import free_port

ENGINE_RESTARTS = "PACELINE_ENGINE_RESTARTS"
GPU_SHARE, GPUS_PER_SERVER = "PACELINE_GPU_SHARE", "PACELINE_GPUS_PER_SERVER"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"

_CONTROLLER = "paceline.controller"
# After the first process has ended, the others get this long to end by themselves and log why.
_COMPANIONS_S = 6.0
# Docker sends these to stop a container, and kills it when the stop period is over.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(words: Sequence[str] | None = None) -> int:
    """Runs the service; returns the container's exit code."""
    module, *arguments = sys.argv[1:] if words is None else words
    if "--version" in arguments:
        print(f"{module} of paceline {own_version()}")
        return 0
    try:
        gpus, places = own_gpus(os.environ), ranks(os.environ)
    except ConfigError as error:
        print(f"paceline container: {error}", file=sys.stderr)
        codes = [2]
    else:
        if gpus is None:
            listed = os.environ.get(VISIBLE_GPUS, "")
            print(f"{module} has nothing to do: no GPU is left for it in {listed!r}", file=sys.stderr)
            return 0
        places = [{**place, **gpus} for place in places]
        codes = asyncio.run(_run((sys.executable, "-m", module, *arguments), places))
    return container_code(module, codes, engine_restarts=os.environ.get(ENGINE_RESTARTS) == "1")


def ranks(environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns the environment variables of each process; [{}] if no number of ranks is given.

    Raises:
        ConfigError: a value is not a number, or there are several hosts and no address of the first.
    """
    if not environ.get("PET_NPROC_PER_NODE"):
        return [{}]
    size, nodes, node = (
        _number(environ, name, default)
        for name, default in (("PET_NPROC_PER_NODE", 1), ("PET_NNODES", 1), ("PET_NODE_RANK", 0))
    )
    if nodes > 1 and not environ.get("PET_MASTER_ADDR"):
        raise ConfigError(f"PET_NNODES={nodes} needs PET_MASTER_ADDR, an address of the host of rank 0")
    port = _number(environ, "PET_MASTER_PORT", 29500) if nodes > 1 else free_port()
    return [
        {
            "RANK": str(node * size + local),
            "WORLD_SIZE": str(nodes * size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": environ["PET_MASTER_ADDR"] if nodes > 1 else "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for local in range(size)
    ]


def own_gpus(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Returns the variable with this container's share of the listed GPUs; {} if it uses all of them.

    Returns None if the list has no share for it.

    Raises:
        ConfigError: a value is not a number.
    """
    if not environ.get(GPU_SHARE):
        return {}
    number, size = _number(environ, GPU_SHARE, 0), _number(environ, GPUS_PER_SERVER, 1)
    if size == 0:
        raise ConfigError(f"{GPUS_PER_SERVER}=0 must be at least 1")
    listed = [gpu.strip() for gpu in environ.get(VISIBLE_GPUS, "").split(",") if gpu.strip()]
    share = listed[number * size : (number + 1) * size]
    return {VISIBLE_GPUS: ",".join(share)} if len(share) == size else None


def container_code(module: str, codes: Sequence[int], *, engine_restarts: bool) -> int:
    """Returns the exit code of a container whose processes ended by themselves with these codes.

    A controller that ends with an error has told the members that the run is over, and they have left, so a
    restart helps only after a signal.
    """
    end = judge(codes)
    if end is End.KILLED:
        return 128 - min(codes)
    code = max(codes)
    if not engine_restarts or code in (0, EXIT_INTERRUPTED):
        return code
    if end is End.FINAL or (end is End.FAILED and module == _CONTROLLER):
        print(f"{module} ended with exit code {code}: a restart would not fix it", file=sys.stderr)
        return 0
    return EXIT_FAILED


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "") or str(default)
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} must be a number")
    return int(text)


async def _run(command: Sequence[str], places: Sequence[Mapping[str, str]]) -> list[int]:
    """Runs the processes until the first one ends; returns the codes of those that ended by themselves."""
    own = {DIE_WITH_PARENT: "1", PARENT_PID: str(os.getpid())}
    processes = [
        await asyncio.create_subprocess_exec(*command, env={**os.environ, **place, **own}) for place in places
    ]
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        # Rank 0 ends the others.
        loop.add_signal_handler(number, _terminate, processes[0])
    exits = [asyncio.create_task(process.wait(), name="exit") for process in processes]
    await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait(exits, timeout=_COMPANIONS_S)
    codes = [task.result() for task in exits if task.done()]
    for process in processes:
        if process.returncode is None:
            process.kill()
    await asyncio.wait(exits)
    return codes


def _terminate(process: Process) -> None:
    if process.returncode is None:
        process.terminate()


if __name__ == "__main__":
    sys.exit(main())
