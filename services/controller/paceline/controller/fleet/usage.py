"""What the members use of their machines over a step, from their heartbeats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from paceline.controller.fleet.membership import Member
from paceline.core.clock import Clock
from paceline.core.members import GpuUsage, Usage

CONTROLLER: Final = "controller"
_GIB: Final = 1 << 30


@dataclass(slots=True)
class _Process:
    """One incarnation of a member: its samples since the last step.

    Attributes:
        since: time and CPU seconds at the last sample before the step, or at the first one.
        last: time and CPU seconds at the newest sample.
        cores: CPU seconds per second between the two; None before there are two samples.
        gpus: samples of each GPU since the last step, by UUID.
    """

    kind: str
    incarnation: str
    since: tuple[float, float]
    last: tuple[float, float]
    memory_bytes: int = 0
    cores: float | None = None
    gpus: dict[str, list[GpuUsage]] = field(default_factory=dict)


class FleetUsage:
    """Makes metrics of a step from the members' reports.

    Args:
        own: samples the controller's process.
    """

    def __init__(self, clock: Clock, own: Callable[[], Usage]) -> None:
        self._clock, self._own = clock, own
        self._processes: dict[str, _Process] = {}

    def note(self, member: Member, usage: Usage) -> None:
        """Notes the usage that a member's process reports."""
        self._note(member.member_id, member.kind.value, member.incarnation, usage)

    def metrics(self, usable: Collection[str]) -> dict[str, float]:
        """Returns the metrics since the last call, by kind of member.

        Args:
            usable: ids of the members that are neither dead nor gone.
        """
        self._note(CONTROLLER, CONTROLLER, "", self._own())
        kept = {CONTROLLER, *usable}
        self._processes = {name: one for name, one in self._processes.items() if name in kept}
        by_kind: dict[str, list[_Process]] = defaultdict(list)
        for process in self._processes.values():
            (began, before), (ended, after) = process.since, process.last
            if ended > began:
                process.cores = (after - before) / (ended - began)
            by_kind[process.kind].append(process)
        metrics = {}
        for kind, processes in sorted(by_kind.items()):
            cores = [process.cores for process in processes if process.cores is not None]
            if cores:
                metrics[f"perf/cpu_cores/{kind}"] = sum(cores)
            metrics[f"perf/resident_gib/{kind}"] = sum(process.memory_bytes for process in processes) / _GIB
            metrics |= _of_gpus(kind, processes)
        for process in self._processes.values():
            process.since = process.last
            process.gpus = {uuid: samples[-1:] for uuid, samples in process.gpus.items()}
        return metrics

    def _note(self, name: str, kind: str, incarnation: str, usage: Usage) -> None:
        now = (self._clock.monotonic(), usage.cpu_seconds)
        process = self._processes.get(name)
        if process is None or process.incarnation != incarnation:
            process = self._processes[name] = _Process(
                kind=kind, incarnation=incarnation, since=now, last=now
            )
        if usage.cpu_seconds < process.last[1]:  # the time of a killed child is lost
            process.since = now
        process.last, process.memory_bytes = now, usage.memory_bytes
        for gpu in usage.gpus:
            process.gpus.setdefault(gpu.uuid, []).append(gpu)


def _of_gpus(kind: str, processes: Collection[_Process]) -> dict[str, float]:
    """Returns the mean utilisation of a kind's GPUs, and the most memory in use on one of them."""
    by_uuid: dict[str, list[GpuUsage]] = defaultdict(list)
    for process in processes:
        for uuid, samples in process.gpus.items():
            by_uuid[uuid] += samples
    if not by_uuid:
        return {}
    shares = [fmean(sample.utilisation for sample in samples) for samples in by_uuid.values()]
    most = max(sample.memory_bytes for samples in by_uuid.values() for sample in samples)
    return {f"perf/gpu_utilisation/{kind}": fmean(shares), f"perf/gpu_memory_gib/{kind}": most / _GIB}
