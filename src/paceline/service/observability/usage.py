"""Measures what this process, its children and its GPUs use of the machine, for the heartbeats."""

from __future__ import annotations

import time
from typing import Final

import psutil

from paceline.core.members import GpuUsage, Usage
from paceline.service.observability import metrics
from paceline.service.observability.gpu_metrics import observe_gpus
from paceline.service.observability.metrics import Metric, Observer

_EVERY_S: Final = 2.0


class UsageSampler:
    """Measures at most every 2 s; in between returns the last sample."""

    def __init__(self, *, uses_gpus: bool) -> None:
        self._root = psutil.Process()
        self._gpus: dict[Metric, Observer] = {}
        if uses_gpus:
            observe_gpus(self._gpus.__setitem__)
        self._sample: Usage | None = None
        self._measured = 0.0

    def sample(self) -> Usage:
        """Returns the newest sample of usage."""
        now = time.monotonic()
        if self._sample is None or now - self._measured >= _EVERY_S:
            self._sample, self._measured = self._measure(), now
        return self._sample

    def _measure(self) -> Usage:
        cpu_seconds, memory_bytes = 0.0, 0
        for process in (self._root, *self._root.children(recursive=True)):
            try:
                times = process.cpu_times()
                memory_bytes += process.memory_info().rss
            except psutil.Error:
                continue  # it has ended; its parent's counters include its time
            cpu_seconds += times.user + times.system + times.children_user + times.children_system
        if self._sample is not None:
            # The kernel rounds a process's time again when the process ends, so the sum can fall by a tick.
            cpu_seconds = max(cpu_seconds, self._sample.cpu_seconds)
        return Usage(cpu_seconds=cpu_seconds, memory_bytes=memory_bytes, gpus=self._measure_gpus())

    def _measure_gpus(self) -> tuple[GpuUsage, ...]:
        read = {
            metric: {labels["uuid"]: value for value, labels in self._gpus[metric]()}
            for metric in (metrics.GPU_UTILISATION, metrics.GPU_MEMORY_USED)
            if metric in self._gpus
        }
        used = read.get(metrics.GPU_MEMORY_USED, {})
        return tuple(
            GpuUsage(uuid=uuid, utilisation=share, memory_bytes=int(used[uuid]))
            for uuid, share in read.get(metrics.GPU_UTILISATION, {}).items()
            if uuid in used
        )
