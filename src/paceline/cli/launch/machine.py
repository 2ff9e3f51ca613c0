"""The cores, GPUs and ports of this machine, found without torch."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_NVIDIA = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The resources that a run's processes share."""

    num_cores: int
    gpus: tuple[int, ...]

    @classmethod
    def here(cls) -> Machine:
        """This machine."""
        return cls(num_cores=num_cores(), gpus=tuple(_gpu_indices()))


def num_cores() -> int:
    """Cores that this process may use; a container often gets fewer than the machine has."""
    quota = _cgroup_cores()
    cores = len(os.sched_getaffinity(0))
    return cores if quota is None else max(1, min(cores, quota))


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _gpu_indices() -> list[int]:
    """GPUs that this process may use, by index; [] if there are none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [int(word) for word in visible.split(",") if word.strip().isdigit()]
    if _NVIDIA.is_dir():
        return list(range(len(list(_NVIDIA.iterdir()))))
    # Some containers show the device files only.
    return sorted(int(path.name.removeprefix("nvidia")) for path in Path("/dev").glob("nvidia[0-9]*"))


def _cgroup_cores() -> int | None:
    file = Path("/sys/fs/cgroup/cpu.max")
    if not file.is_file():
        return None
    quota, _, period = file.read_text(encoding="ascii").partition(" ")
    return None if quota == "max" else -(-int(quota) // int(period))
