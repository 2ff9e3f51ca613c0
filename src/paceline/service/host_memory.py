"""Measures the memory of this host, or of the container in which this process runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil

CGROUPS: Final[Mapping[Path, tuple[str, str]]] = {
    Path("/sys/fs/cgroup"): ("memory.max", "memory.current"),
    Path("/sys/fs/cgroup/memory"): ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Where a container finds its own limit, and the files of limit and use: cgroups of version 2 and 1."""


def host_bytes(cgroups: Mapping[Path, tuple[str, str]] = CGROUPS) -> int:
    """Returns the host's memory, or the container's limit if that is lower."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits(cgroups).values()])


def free_host_bytes(cgroups: Mapping[Path, tuple[str, str]] = CGROUPS) -> int:
    """Returns the memory that this host can still give, or what its container may still take if that is less.

    Files in the page cache count as free: the kernel drops them when memory is needed.
    """
    free = [psutil.virtual_memory().available]
    for folder, limit in _limits(cgroups).items():
        used = _read(folder / cgroups[folder][1])
        if used is not None:
            free.append(max(0, limit - used + _num_cached(folder)))
    return min(free)


def _limits(cgroups: Mapping[Path, tuple[str, str]]) -> dict[Path, int]:
    limits = {folder: _read(folder / name) for folder, (name, _) in cgroups.items()}
    return {folder: limit for folder, limit in limits.items() if limit is not None}


def _read(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        return int(file.read_text(encoding="ascii"))
    return None


def _num_cached(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        words = [line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines()]
        counts = {name: int(number) for name, number in words}
        return counts.get("total_inactive_file", counts.get("inactive_file", 0))
    return 0
