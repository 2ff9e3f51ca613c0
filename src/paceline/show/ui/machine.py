"""Measures what the processes of a run and the GPUs of this machine use now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil

from paceline.service.observability import metrics
from paceline.service.observability.gpu_metrics import observe_gpus
from paceline.service.observability.metrics import Metric, Observer

_GPU_FIELDS = {
    metrics.GPU_UTILISATION: "utilisation",
    metrics.GPU_MEMORY_USED: "memory_used",
    metrics.GPU_MEMORY_TOTAL: "memory_total",
}


class MachineUsage:
    """Measures usage repeatedly: a process's CPU usage is counted since the last call."""

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}
        self._gpus: dict[Metric, Observer] = {}
        observe_gpus(self._gpus.__setitem__)

    def processes(self, pids: Mapping[str, int]) -> list[dict[str, Any]]:
        """Returns memory and CPU cores of each named process, including its children without a name."""
        families = {name: _family(pid) for name, pid in sorted(pids.items())}
        seen: dict[int, psutil.Process] = {}
        usage = []
        for name, family in families.items():
            others = {
                p for other, pid in pids.items() if other != name and pid in family for p in families[other]
            }
            own = [process for pid, process in family.items() if pid not in others]
            usage.append({"name": name, **self._usage(own, seen)})
        self._known = seen
        return [entry for entry in usage if entry["bytes"]]

    def gpus(self) -> list[dict[str, Any]]:
        """Returns memory and utilisation of each visible GPU; [] without the package nvidia-ml-py."""
        by_name: dict[str, dict[str, Any]] = {}
        for metric, field in _GPU_FIELDS.items():
            for value, labels in self._gpus[metric]() if metric in self._gpus else ():
                by_name.setdefault(labels["gpu"], {"name": labels["gpu"]})[field] = value
        return [gpu for gpu in by_name.values() if len(gpu) == len(_GPU_FIELDS) + 1]

    def _usage(self, family: list[psutil.Process], seen: dict[int, psutil.Process]) -> dict[str, float]:
        cores, size = 0.0, 0
        for process in family:
            known = seen[process.pid] = self._known.get(process.pid, process)
            try:
                cores += known.cpu_percent(None) / 100
                size += known.memory_info().rss
            except psutil.Error:
                continue  # it has ended meanwhile
        return {"cores": round(cores, 2), "bytes": size}


def _family(pid: int) -> dict[int, psutil.Process]:
    """Returns a process and its descendants; {} if it has ended."""
    try:
        root = psutil.Process(pid)
        return {process.pid: process for process in (root, *root.children(recursive=True))}
    except psutil.Error:
        return {}
