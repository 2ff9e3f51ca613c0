"""The cores, GPUs and ports of this machine, found without torch."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.cards import Card, card_of
from paceline.core.errors import EnvironmentLackError
from paceline.engines.registry import ENGINES
from paceline.service import packages
from paceline.service.host_memory import free_host_bytes
from paceline.service.observability.gpu_metrics import visible_gpus
from paceline.service.ports import kernel_ports, unused_port

_NVIDIA = Path("/proc/driver/nvidia/gpus")
# Kubernetes publishes services on the ports from 30000 on.
_FIRST_PORT, _LAST_PORT, _PORT_TRIES = 15_000, 29_999, 50
# A generator of its own, because a seed set elsewhere must not give two processes the same ports.
_RANDOM = random.SystemRandom()
_GIVEN: set[int] = set()


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The resources that a run's processes share.

    Attributes:
        num_unusable_gpus: GPUs of the machine that the installed build of torch cannot use.
        gpu_bytes: memory of each GPU for which it is known.
        card: model of the GPUs; None if it is unknown, or if they differ.
        host_bytes: free memory of the host, or of the container.
    """

    num_cores: int
    gpus: tuple[int, ...]
    num_unusable_gpus: int = 0
    gpu_bytes: Mapping[int, int] = field(default_factory=dict)
    card: Card | None = None
    host_bytes: int = 0

    @classmethod
    def here(cls) -> Machine:
        """Returns the resources of this machine."""
        gpus = tuple(_gpu_indices())
        if gpus and is_cpu_build():
            return cls(num_cores=num_cores(), gpus=(), num_unusable_gpus=len(gpus))
        seen = visible_gpus() if gpus else {}
        cards = {card_of(gpu.name) for gpu in seen.values()}
        return cls(
            num_cores=num_cores(),
            gpus=gpus,
            gpu_bytes={index: gpu.num_bytes for index, gpu in seen.items()},
            card=cards.pop() if len(cards) == 1 else None,
            host_bytes=free_host_bytes(),
        )

    @classmethod
    def imagined(cls, count: int, card: Card) -> Machine:
        """Returns a machine with `count` GPUs of a model, and with twice their memory in the host."""
        gpus, host_bytes = tuple(range(count)), 2 * count * card.num_bytes
        gpu_bytes = dict.fromkeys(gpus, card.num_bytes)
        return cls(num_cores=num_cores(), gpus=gpus, gpu_bytes=gpu_bytes, card=card, host_bytes=host_bytes)


def is_cpu_build() -> bool:
    """Returns whether torch or the engine is installed in its build for CPUs; neither is imported."""
    torch = packages.version("torch")
    if torch is not None and torch.endswith("+cpu"):
        return True
    builds = [(facts, build) for facts in ENGINES.values() if (build := facts.installed_build)]
    return bool(builds) and all(build == facts.cpu_build for facts, build in builds)


def num_cores() -> int:
    """Cores that this process may use; a container often gets fewer than the machine has."""
    quota = _cgroup_cores()
    cores = len(os.sched_getaffinity(0))
    return cores if quota is None else max(1, min(cores, quota))


def free_port(among: range | None = None) -> int:
    """Returns a port that is free at this moment and that this process has not received before.

    It is one of `among`, if given. Otherwise it lies outside the range that the system assigns to connections
    and to servers without a fixed port, because the receiver may take seconds to bind it.

    Raises:
        EnvironmentLackError: no port of `among` is free.
    """
    kernel = kernel_ports()
    candidates = among or range(_FIRST_PORT, min(kernel[0] if kernel else 0, _LAST_PORT + 1))
    tries = len(candidates) if among else min(_PORT_TRIES, len(candidates))
    for port in _RANDOM.sample(candidates, tries):
        if port in _GIVEN:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _GIVEN.add(port)
            return port
    if among:
        raise EnvironmentLackError(
            f"no port of service.ports={among[0]}-{among[-1]} is free; name a wider range"
        )
    return unused_port()


def _gpu_indices() -> list[int]:
    """GPUs that this process may use, by index; [] if there are none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        words = [word.strip() for word in visible.split(",")]
        uuids = {} if all(word.isdigit() or word == "-1" for word in words) else _gpu_uuids()
        return [index for word in words if (index := _index(word, uuids)) is not None]
    if _NVIDIA.is_dir():
        return list(range(len(list(_NVIDIA.iterdir()))))
    # Some containers show only the device files.
    return sorted(int(path.name.removeprefix("nvidia")) for path in Path("/dev").glob("nvidia[0-9]*"))


def _index(word: str, uuids: Mapping[str, int]) -> int | None:
    """Returns the GPU of an entry of CUDA_VISIBLE_DEVICES: an index, or the beginning of a UUID."""
    if word.isdigit():
        return int(word)
    meant = [index for uuid, index in uuids.items() if word and uuid.startswith(word)]
    return meant[0] if len(meant) == 1 else None


def _gpu_uuids() -> dict[str, int]:
    """Indices of this machine's GPUs by UUID; {} if nvidia-smi does not list them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    query = [tool, "--query-gpu=uuid,index", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    pairs = (line.split(",") for line in answer.stdout.splitlines())
    return {uuid.strip(): int(index) for uuid, index in pairs}


def _cgroup_cores() -> int | None:
    file = Path("/sys/fs/cgroup/cpu.max")
    if not file.is_file():
        return None
    quota, _, period = file.read_text(encoding="ascii").partition(" ")
    return None if quota == "max" else -(-int(quota) // int(period))
