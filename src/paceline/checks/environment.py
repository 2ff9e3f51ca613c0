"""Examines this machine: what it offers to a run, what it lacks, and how to add it."""

from __future__ import annotations

import asyncio
import ctypes.util
import datetime
import enum
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

from paceline.core.errors import EnvironmentLackError
from paceline.engines.facts import EngineFacts
from paceline.engines.registry import ENGINES
from paceline.service import packages
from paceline.service.confinement.confined import why_not_confined
from paceline.sizing.machine import free_port, is_cpu_build, num_cores

_GIB = 2**30
_CUDA = "a new environment with requirements/cuda.txt; `rm -r .venv && make venv-cuda` in a clone"
INSTALL = "`make venv` in a clone; else a lock file that `paceline examples` writes (docs/start.md)"
_MIN_FILES = 4096
# The validity of certificates and tokens depends on the clock.
_EARLIEST = 1_750_000_000


class Status(enum.Enum):
    """Whether a part is there; a run on this machine fails if a part is LACKING."""

    OK = "ok"
    LACKING = "lacks"
    NOTE = "note"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """States what is known about one part of the machine; `hint` says what to do."""

    part: str
    state: str
    status: Status = Status.OK
    hint: str = ""


def examine() -> list[Finding]:
    """Examines all parts of the machine."""
    return [finding for part in _PARTS for finding in part()]


def _python() -> Iterable[Finding]:
    number = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 11) <= sys.version_info[:2] < (3, 13)
    yield _judge("Python", number, fits, hint="use Python 3.11 or 3.12", otherwise=Status.LACKING)


def _packages() -> Iterable[Finding]:
    yield _package("torch", hint=INSTALL)
    yield from _engines()
    for package in ("transformers", "grpcio", "redis", "pydantic", "pyarrow"):
        yield _package(package, hint=INSTALL)
    for package in ("torchvision", "torchaudio", "torchcodec"):
        if packages.version(package) and any(_is_for_cpus(facts) for facts in ENGINES.values()):
            yield Finding(
                part=package,
                state=str(packages.version(package)),
                status=Status.NOTE,
                hint=f"breaks transformers with a CPU torch: pip uninstall {package}",
            )


def _engines() -> Iterable[Finding]:
    """Lists the installed engines; a run needs one of them."""
    installed = [facts for facts in ENGINES.values() if facts.installed_build]
    if not installed:
        titles = " or ".join(facts.title for facts in ENGINES.values())
        yield Finding(part=titles, state="no", status=Status.LACKING, hint=INSTALL)
    for facts in installed:
        yield Finding(part=facts.title, state=_build(facts.installed_build))
        if library := facts.lacking_library:
            hint = f"{facts.title} loads it: {library.remedy}"
            yield Finding(part=library.name, state="no", status=Status.LACKING, hint=hint)


def _is_for_cpus(facts: EngineFacts) -> bool:
    return bool(facts.installed_build) and facts.installed_build == facts.cpu_build


def _build(package: str) -> str:
    return f"{package} {packages.version(package)}"


def _package(name: str, *, hint: str) -> Finding:
    number = packages.version(name)
    return _judge(name, number or "no", number is not None, hint=hint, otherwise=Status.LACKING)


def _confinement() -> Iterable[Finding]:
    problem = asyncio.run(why_not_confined())
    state = "no" if problem else "yes, for reward.code"
    yield _judge("confined code", state, not problem, hint=f"for reward.code: {problem}")


def _redis() -> Iterable[Finding]:
    from paceline.broker.redis.redis_server import find_server

    try:
        yield Finding(part="Redis server", state=str(find_server()))
    except EnvironmentLackError as error:
        yield Finding(part="Redis server", state="no", status=Status.LACKING, hint=str(error))


def _gpus() -> Iterable[Finding]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield Finding(
            part="GPUs", state="none", status=Status.NOTE, hint="everything runs on the CPU, for small models"
        )
        return
    query = [tool, "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding(part="GPUs", state="nvidia-smi fails", status=Status.LACKING, hint=str(error))
        return
    drivers = set()
    for line in answer.stdout.splitlines():
        index, _, rest = line.partition(",")
        drivers.add(rest.rpartition(",")[2].strip())
        yield Finding(part=f"GPU {index}", state=rest.strip())
    if drivers and is_cpu_build():
        engines = [facts.cpu_build for facts in ENGINES.values() if facts.has_cpu_build]
        builds = [_build(name) for name in ("torch", *engines) if packages.version(name)]
        yield Finding(
            part="builds",
            state=f"{', '.join(builds)}: for CPUs, although there are GPUs",
            status=Status.LACKING,
            hint=_CUDA,
        )
        return
    yield from (_driver(driver) for driver in sorted(drivers))
    yield from _nccl()
    yield _attention()


# The oldest driver of each CUDA, by its first number (NVIDIA's compatibility table).
_DRIVERS = {"12": 525, "13": 580}


def _driver(driver: str) -> Finding:
    """Returns whether the driver is new enough for the CUDA that torch brings."""
    cuda = next((name for name in _DRIVERS if _nccl_wheel(name)), None)
    if cuda is None or not driver.split(".")[0].isdigit():
        return Finding(part="driver", state=driver)
    fits = int(driver.split(".")[0]) >= _DRIVERS[cuda]
    hint = f"CUDA {cuda} needs driver {_DRIVERS[cuda]} or newer"
    return _judge("driver", f"{driver}, CUDA {cuda} installed", fits, hint=hint, otherwise=Status.LACKING)


def _nccl_wheel(cuda: str) -> str:
    name = f"nvidia-nccl-cu{cuda}"
    return f"{name} {packages.version(name)}" if packages.version(name) else ""


def _nccl() -> Iterable[Finding]:
    library = next(filter(None, map(_nccl_wheel, _DRIVERS)), "") or ctypes.util.find_library("nccl")
    hint = f"torch brings it: {_CUDA}"
    yield _judge("NCCL", library or "no", bool(library), hint=hint, otherwise=Status.LACKING)


def _attention() -> Finding:
    """Returns whether the learner has the faster of its attention kernels."""
    if number := packages.version("flash-attn-4"):
        return Finding(part="attention", state=f"flash-attn-4 {number}, on Hopper and Blackwell")
    hint = "on Hopper and Blackwell an update is faster with it; requirements/cuda.txt has it"
    return Finding(part="attention", state="torch's, no flash-attn-4", status=Status.NOTE, hint=hint)


def _ports() -> Iterable[Finding]:
    try:
        port = free_port()
        with socket.create_server(("127.0.0.1", port)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError as error:
        yield Finding(
            part="ports",
            state=str(error),
            status=Status.LACKING,
            hint="allow listening on 127.0.0.1 in this container",
        )
        return
    yield Finding(part="ports", state=f"loopback works, {port} is free")


def _shared_memory() -> Iterable[Finding]:
    try:
        stats = os.statvfs("/dev/shm")
    except OSError:
        yield Finding(part="/dev/shm", state="no", status=Status.LACKING, hint="mount a tmpfs on /dev/shm")
        return
    free = stats.f_bavail * stats.f_frsize / _GIB
    hint = "give the container more (docker run --shm-size=8g): engines and NCCL use it"
    yield _judge("/dev/shm", f"{free:.1f} GiB free", free >= 1, hint=hint)


def _resources() -> Iterable[Finding]:
    cores = num_cores()
    usable = f"{cores} usable of {os.cpu_count()}"
    hint = "services will wait for each other; 2 or more are better"
    yield _judge("cores", usable, cores >= 2, hint=hint)
    memory = psutil.virtual_memory()
    available = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB available"
    yield _judge("memory", available, memory.available >= 6 * _GIB, hint="the demo needs about 6 GiB")
    free = shutil.disk_usage(".").free
    hint = "checkpoints hold the model, its optimizer's state and a critic"
    yield _judge("disk here", f"{free / _GIB:.1f} GiB free", free >= 5 * _GIB, hint=hint)


def _limits() -> Iterable[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = files == resource.RLIM_INFINITY
    hint = f"ulimit -n {_MIN_FILES}: each connection takes a file descriptor"
    state = "unlimited" if unlimited else str(files)
    yield _judge("open files", state, unlimited or files >= _MIN_FILES, hint=hint)


def _clock() -> Iterable[Finding]:
    now = time.time()
    said = datetime.datetime.fromtimestamp(now, tz=datetime.UTC).isoformat(timespec="seconds")
    hint = "set the clock: certificates depend on it, and times of several hosts are compared"
    yield _judge("clock", said, now > _EARLIEST, hint=hint)


def _judge(part: str, state: str, ok: bool, *, hint: str, otherwise: Status = Status.NOTE) -> Finding:
    return (
        Finding(part=part, state=state)
        if ok
        else Finding(part=part, state=state, status=otherwise, hint=hint)
    )


_PARTS: tuple[Callable[[], Iterable[Finding]], ...] = (
    _python,
    _packages,
    _redis,
    _confinement,
    _gpus,
    _ports,
    _shared_memory,
    _resources,
    _limits,
    _clock,
)
