"""What the processes of a run and the GPUs of this machine take now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil

from paceline.service import metrics
from paceline.service.gpu_metrics import observe_gpus
from paceline.service.metrics import Metric, Observer

_GPU_FIELDS = {
    metrics.GPU_UTILISATION: "utilisation",
    metrics.GPU_MEMORY_USED: "memory_used",
    metrics.GPU_MEMORY_TOTAL: "memory_total",
}


class Machine:
    """Asked again and again: a process' share of the CPU is counted since the last time."""

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}
        self._gpus: dict[Metric, Observer] = {}
        observe_gpus(self._gpus.__setitem__)

    def processes(self, pids: Mapping[str, int]) -> list[dict[str, Any]]:
        """Memory and CPU cores of each process and all that it has started."""
        seen: dict[int, psutil.Process] = {}
        usage = [{"name": name, **self._usage(pid, seen)} for name, pid in sorted(pids.items())]
        self._known = seen
        return [entry for entry in usage if entry["bytes"]]

    def gpus(self) -> list[dict[str, Any]]:
        """Memory and utilisation of each visible GPU; [] without the package nvidia-ml-py."""
        by_name: dict[str, dict[str, Any]] = {}
        for metric, field in _GPU_FIELDS.items():
            for value, labels in self._gpus[metric]() if metric in self._gpus else ():
                by_name.setdefault(labels["gpu"], {"name": labels["gpu"]})[field] = value
        return [gpu for gpu in by_name.values() if len(gpu) == len(_GPU_FIELDS) + 1]

    def _usage(self, pid: int, seen: dict[int, psutil.Process]) -> dict[str, float]:
        cores, size = 0.0, 0
        try:
            root = self._known.get(pid) or psutil.Process(pid)
            family = [root, *root.children(recursive=True)]
        except psutil.Error:
            return {"cores": 0.0, "bytes": 0}
        for process in family:
            known = seen[process.pid] = self._known.get(process.pid, process)
            try:
                cores += known.cpu_percent(None) / 100
                size += known.memory_info().rss
            except psutil.Error:
                continue  # it has ended meanwhile
        return {"cores": round(cores, 2), "bytes": size}
