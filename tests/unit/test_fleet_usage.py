"""What members take of their machines: measured, sent with heartbeats, and made metrics of a step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.controller.fleet.membership import Member
from paceline.controller.fleet.usage import FleetUsage
from paceline.core.members import GpuUsage, MemberKind, Usage
from paceline.service.observability import usage as sampling
from paceline.service.observability.usage import UsageSampler
from paceline.show.metrics import METRICS
from paceline.wire.calls.members import usage_from_proto, usage_to_proto
from support.clocks import ManualClock

GIB = 1 << 30


def member(name: str, kind: MemberKind = MemberKind.ROLLOUT, incarnation: str = "a") -> Member:
    return Member(kind=kind, member_id=name, incarnation=incarnation, address="", num_ranks=1, last_heard=0.0)


def gpu(uuid: str, utilisation: float, gib: float) -> GpuUsage:
    return GpuUsage(uuid=uuid, utilisation=utilisation, memory_bytes=int(gib * GIB))


def usage(cpu_seconds: float, gib: float = 1.0, *gpus: GpuUsage) -> Usage:
    return Usage(cpu_seconds=cpu_seconds, memory_bytes=int(gib * GIB), gpus=gpus)


class Fleet:
    """Members that report, and a controller that takes a quarter of a core."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.usage = FleetUsage(self.clock, lambda: usage(0.25 * self.clock.monotonic(), 0.5))

    def at(self, seconds: float, **reports: Usage) -> None:
        self.clock.advance(seconds - self.clock.monotonic())
        for name, report in reports.items():
            self.usage.note(member(name), report)

    def metrics(self, *names: str) -> dict[str, float]:
        return self.usage.metrics(names)


def test_cores_are_cpu_seconds_per_second_of_all_members_of_a_kind() -> None:
    fleet = Fleet()
    fleet.at(0.0, r0=usage(10.0, 2.0), r1=usage(100.0, 3.0))
    fleet.at(4.0, r0=usage(16.0, 2.5), r1=usage(102.0, 3.0))
    first = fleet.metrics("r0", "r1")
    assert first["perf/cpu_cores/rollout"] == 1.5 + 0.5
    assert first["perf/resident_gib/rollout"] == 5.5
    assert "perf/cpu_cores/controller" not in first  # it was seen once
    fleet.at(6.0, r0=usage(17.0, 2.5), r1=usage(102.0, 3.0))
    second = fleet.metrics("r0", "r1")
    assert second["perf/cpu_cores/rollout"] == 0.5
    assert (second["perf/cpu_cores/controller"], second["perf/resident_gib/controller"]) == (0.25, 0.5)
    # A step that is over before the next heartbeat has what the last one had.
    assert fleet.metrics("r0", "r1")["perf/cpu_cores/rollout"] == 0.5


def test_members_that_are_gone_or_new_do_not_count_for_more_than_they_take() -> None:
    fleet = Fleet()
    fleet.at(0.0, r0=usage(10.0), r1=usage(50.0))
    fleet.at(2.0, r0=usage(12.0), r1=usage(54.0))
    assert fleet.metrics("r0", "r1")["perf/cpu_cores/rollout"] == 3.0
    fleet.at(4.0, r0=usage(14.0))
    gone = fleet.metrics("r0")
    assert (gone["perf/cpu_cores/rollout"], gone["perf/resident_gib/rollout"]) == (1.0, 1.0)
    fleet.clock.advance(2.0)
    fleet.usage.note(member("r0", incarnation="b"), usage(20.0))
    fleet.clock.advance(2.0)
    fleet.usage.note(member("r0", incarnation="b"), usage(24.0))
    assert fleet.metrics("r0")["perf/cpu_cores/rollout"] == 2.0


def test_seconds_that_went_with_a_killed_child_are_no_negative_cores() -> None:
    fleet = Fleet()
    fleet.at(0.0, r0=usage(100.0))
    fleet.at(2.0, r0=usage(20.0))
    fleet.at(4.0, r0=usage(23.0))
    assert fleet.metrics("r0")["perf/cpu_cores/rollout"] == 1.5


def test_gpus_that_two_members_see_count_once_and_the_fullest_is_shown() -> None:
    fleet = Fleet()
    fleet.at(0.0, r0=usage(0.0, 1.0, gpu("x", 0.2, 10.0)), r1=usage(0.0, 1.0, gpu("y", 0.8, 30.0)))
    fleet.at(1.0, r0=usage(0.0, 1.0, gpu("x", 0.4, 40.0)), r1=usage(0.0, 1.0, gpu("x", 0.6, 5.0)))
    fleet.usage.note(member("l0", MemberKind.LEARNER), usage(0.0, 1.0, gpu("x", 1.0, 50.0)))
    metrics = fleet.metrics("r0", "r1", "l0")
    assert metrics["perf/gpu_utilisation/rollout"] == pytest.approx((0.4 + 0.8) / 2)
    assert metrics["perf/gpu_memory_gib/rollout"] == 40.0
    assert (metrics["perf/gpu_utilisation/learner"], metrics["perf/gpu_memory_gib/learner"]) == (1.0, 50.0)
    # What is left of the step before is its last sample.
    assert fleet.metrics("r0", "r1")["perf/gpu_memory_gib/rollout"] == 40.0
    assert not any("gpu" in name for name in fleet.metrics())


# Run as a process of its own, which has no other children.
COUNTS_A_CHILD = """
import json, subprocess, sys
from paceline.service.observability import usage as sampling
sampling._EVERY_S = 0.0
sampler = sampling.UsageSampler(uses_gpus=False)
samples = [sampler.sample()]
work = "taken = bytearray(200 << 20); sum(range(20_000_000)); print('done', flush=True); open(0).read()"
with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    assert child.stdout.readline() == b"done\\n"
    samples.append(sampler.sample())
    child.stdin.close()
samples.append(sampler.sample())
print(json.dumps([[one.memory_bytes, one.cpu_seconds] for one in samples]))
"""


def test_a_process_counts_what_it_has_started() -> None:
    output = subprocess.run([sys.executable, "-c", COUNTS_A_CHILD], capture_output=True, check=True).stdout
    (before, started), (during, worked), (after, ended) = json.loads(output)
    assert during - before > 150 << 20
    assert after < during - (150 << 20)
    assert 0.1 < worked - started <= ended - started


def test_the_time_of_processes_never_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's sum falls by a tick when a child ends."""
    monkeypatch.setattr(sampling, "_EVERY_S", 0.0)
    sampler = UsageSampler(uses_gpus=False)
    real = sampler._root.cpu_times()
    times = iter([real._replace(user=real.user + more) for more in (1.0, 0.99, 1.0, 1.25)])
    process = SimpleNamespace(
        cpu_times=lambda: next(times),
        memory_info=sampler._root.memory_info,
        children=lambda *, recursive: [],
    )
    monkeypatch.setattr(sampler, "_root", process)
    first, *later = (sampler.sample().cpu_seconds for _ in range(4))
    assert [seconds - first for seconds in later] == pytest.approx([0.0, 0.0, 0.25])


def test_samples_are_not_taken_at_every_heartbeat() -> None:
    sampler = UsageSampler(uses_gpus=False)
    assert sampler.sample() is sampler.sample()


def test_gpus_are_those_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "support" / "fake_nvml"))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    [shown] = UsageSampler(uses_gpus=True).sample().gpus
    assert UsageSampler(uses_gpus=False).sample().gpus == ()
    assert (shown.utilisation, shown.memory_bytes, shown.uuid) == (0.5, 7 << 30, "GPU-0")
    sys.modules.pop("pynvml", None)


def test_a_report_arrives_as_it_was_sent() -> None:
    report = usage(3.5, 2.0, gpu("x", 0.25, 10.0), gpu("y", 0.5, 20.0))
    assert usage_from_proto(usage_to_proto(report)) == report
    assert {metric.name for metric in METRICS if metric.chart == "GPU memory in use"} >= {
        "perf/gpu_memory_gib/rollout",
        "perf/gpu_memory_gib/learner",
    }
