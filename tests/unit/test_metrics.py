"""Metrics: the endpoint of a process, stable names, gauges that go away, GPUs, ports of a run's processes."""

from __future__ import annotations

import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.broker import names
from paceline.broker.base import Outgoing
from paceline.broker.mailbox import Mailbox
from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.launch.planning import plan
from paceline.service.observability import metrics, prometheus, telemetry
from paceline.service.observability.gpu_metrics import observe_gpus
from paceline.service.observability.metrics import Metric, MetricKind, Observation, Observer
from paceline.sizing import machine as machines
from paceline.sizing.machine import Machine, free_port
from support import cli_configs
from support.measured import measured
from support.memory_broker import MemoryBroker

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
_WHO = {"service_name", "service_instance_id"}


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
        return str(answer.read().decode())


def series(port: int) -> Series:
    """Values by name and labels, without the labels that every series has."""
    return {
        (sample.name, frozenset((k, v) for k, v in sample.labels.items() if k not in _WHO)): sample.value
        for family in text_string_to_metric_families(scrape(port))
        for sample in family.samples
    }


def value(seen: Series, metric: Metric, **labels: str) -> float | None:
    return seen.get((metric.name, frozenset(labels.items())))


@pytest.fixture
def port() -> Iterator[int]:
    chosen = free_port()
    telemetry.setup("rollout", run_dir=None, prometheus_port=chosen, instance="rollout-0")
    yield chosen
    telemetry.shutdown()


def test_gauges_and_counters_keep_their_values_between_scrapes(port: int) -> None:
    telemetry.record(metrics.PUSH_SECONDS, 3.0)
    telemetry.record(metrics.PUSH_SECONDS, 1.5)
    telemetry.count(metrics.REFUSALS, reason="deadline")
    telemetry.count(metrics.REFUSALS, 2, reason="deadline")
    for _ in range(2):
        seen = series(port)
        assert value(seen, metrics.PUSH_SECONDS) == 1.5
        assert value(seen, metrics.REFUSALS, reason="deadline") == 3
    assert 'service_name="paceline.rollout"' in scrape(port)
    assert 'service_instance_id="rollout-0"' in scrape(port)


def test_an_observed_series_that_is_gone_is_not_exported() -> None:
    members: dict[str, float] = {"rollout-0": 4.0, "rollout-1": 2.0}

    def in_flight() -> Iterator[Observation]:
        for member, number in members.items():
            yield number, {"kind": "rollout", "member": member}

    with measured() as read:
        telemetry.observe(metrics.MEMBER_IN_FLIGHT, in_flight)
        assert read(metrics.MEMBER_IN_FLIGHT) == {"rollout rollout-0": 4.0, "rollout rollout-1": 2.0}
        del members["rollout-1"]
        assert read(metrics.MEMBER_IN_FLIGHT) == {"rollout rollout-0": 4.0}


def test_a_long_run_has_one_series_per_training_metric() -> None:
    with measured() as read:
        for step in range(200):
            telemetry.record_training(step, {"actor/grad_norm": step / 2, "reward/a-b/mean": 1.0})
        assert metrics.training("reward/a-b/mean").name == "paceline_training_reward_a_b_mean"
        assert read(metrics.training("actor/grad_norm")) == {"": 99.5}
        assert read(metrics.training("reward/a-b/mean")) == {"": 1.0}
        assert read(metrics.TRAINING_STEP) == {"": 199}


def test_the_process_measures_itself(port: int) -> None:
    seen = series(port)
    assert 10e6 < (value(seen, metrics.MEMORY, part="self") or 0) < 50e9
    assert value(seen, metrics.MEMORY, part="children") is not None
    assert (value(seen, metrics.CPU) or 0) > 0.1
    assert (value(seen, metrics.OPEN_FILES) or 0) >= 4
    assert (value(seen, metrics.START_TIME) or 0) > 1.6e9


async def test_a_mailbox_counts_what_it_takes_and_what_comes_again() -> None:
    broker, stream = MemoryBroker(), names.prompts("r", 3)
    with measured() as read:
        async with Mailbox(broker, stream, "g", "a", block_s=0.0) as box:
            assert read(metrics.REDELIVERIES) == read(metrics.LEASES_LOST) == {"prompts": 0}
            await broker.append(
                [Outgoing(stream=stream, payload=b"1"), Outgoing(stream=stream, payload=b"2")]
            )
            entries = await box.take()
            await box.give_back(entries[:1])
            box._next_reclaim_s = 0.0
            await box.take(block_s=0.5)
        assert read(metrics.DELIVERIES) == {"prompts": 3}
        assert read(metrics.REDELIVERIES) == {"prompts": 1}


def test_the_endpoint_is_on_loopback_unless_asked_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prometheus.wanted_host() == "127.0.0.1"
    # None of the ports that the system gives away: another program's server would answer in its place.
    chosen = free_port()
    with socket.create_server(("127.0.0.2", chosen)):
        telemetry.setup("reward", run_dir=None, prometheus_port=chosen)
        assert "paceline_process" in scrape(chosen)
    telemetry.shutdown()
    with pytest.raises(OSError, match="refused"):
        scrape(chosen)
    monkeypatch.setenv(prometheus.HOST, "127.0.0.2")
    telemetry.setup("reward", run_dir=None, prometheus_port=chosen)
    with pytest.raises(OSError, match="refused"):
        scrape(chosen)
    telemetry.shutdown()


def test_no_port_no_metrics() -> None:
    telemetry.setup("reward", run_dir=None)
    assert not telemetry.is_measuring()
    telemetry.record(metrics.PUSH_SECONDS, 1.0)
    telemetry.shutdown()


def test_the_environment_overrides_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(prometheus.PORT, "0")
    assert prometheus.wanted_port(9464) == 0
    monkeypatch.setenv(prometheus.PORT, "9999")
    assert prometheus.wanted_port(0) == 9999
    for wrong in ("abc", "-1", "70000"):
        monkeypatch.setenv(prometheus.PORT, wrong)
        with pytest.raises(ConfigError, match=f"{prometheus.PORT}={wrong} is not a port"):
            prometheus.wanted_port(0)


def test_a_taken_port_costs_the_endpoint_and_not_the_training(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        chosen = other.getsockname()[1]
        telemetry.setup("reward", run_dir=None, prometheus_port=chosen)
    assert not telemetry.is_measuring()
    assert f"no metrics endpoint on 127.0.0.1:{chosen}" in caplog.text
    assert prometheus.PORT in caplog.text
    telemetry.shutdown()


def test_without_the_exporter_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.prometheus", None)
    with pytest.raises(EnvironmentLackError, match="pip install opentelemetry-exporter-prometheus"):
        telemetry.setup("x", run_dir=None, prometheus_port=free_port())


def test_names_are_unique_and_follow_prometheus() -> None:
    catalogue = [entry for entry in vars(metrics).values() if isinstance(entry, Metric)]
    assert len({metric.name for metric in catalogue}) == len(catalogue) > 25
    for metric in catalogue:
        assert metric.name.startswith("paceline_")
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)


# --- GPUs


class NvmlError(Exception):
    pass


class FakeNvml(SimpleNamespace):
    """Two GPUs; the second has no power meter."""

    NVMLError = NvmlError

    def nvmlInit(self) -> None:
        if not self.count:
            raise NvmlError("no driver")

    def nvmlDeviceGetCount(self) -> int:
        return int(self.count)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetName(self, handle: int) -> str:
        return ("NVIDIA H100 80GB HBM3", "NVIDIA H200")[handle]

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=(handle + 1) * 2**30, total=80 * 2**30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=50 + handle)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle == 1:
            raise NvmlError("not supported")
        return 345_600


@pytest.mark.parametrize(
    ("visible", "card", "gpus"), [("1", "H200", (1,)), ("0", "H100", (0,)), (None, None, (0, 1))]
)
def test_a_machine_knows_its_gpus_by_the_driver(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, card: str | None, gpus: tuple[int, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(count=2))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(machines, "_gpu_indices", lambda: list(gpus))
    monkeypatch.setattr(machines, "is_cpu_build", lambda: False)
    here = Machine.here()
    assert here.gpu_bytes == dict.fromkeys(gpus, 80 * 2**30)
    assert (here.card.name if here.card else None) == card
    assert here.host_bytes > 2**20


def gpu_series(monkeypatch: pytest.MonkeyPatch, *, count: int, visible: str | None) -> dict[str, float]:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(count=count))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    seen: dict[str, float] = {}

    def observe(metric: Metric, observer: Observer) -> None:
        name = metric.name.removeprefix("paceline_gpu_")
        seen.update({f"{name} {labels['gpu']} {labels['uuid']}": number for number, labels in observer()})

    observe_gpus(observe)
    return seen


def test_gpus_are_measured_and_what_a_gpu_does_not_know_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_series(monkeypatch, count=2, visible=None) == {
        "memory_used_bytes 0 GPU-0": 2**30,
        "memory_used_bytes 1 GPU-1": 2 * 2**30,
        "memory_total_bytes 0 GPU-0": 80 * 2**30,
        "memory_total_bytes 1 GPU-1": 80 * 2**30,
        "utilisation_ratio 0 GPU-0": 0.5,
        "utilisation_ratio 1 GPU-1": 0.51,
        "power_watts 0 GPU-0": 345.6,
    }


@pytest.mark.parametrize("visible", ["1", "GPU-1", "1,-1,0"])
def test_only_visible_gpus_are_measured(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    assert {key.split()[1] for key in gpu_series(monkeypatch, count=2, visible=visible)} == {"1"}


@pytest.mark.parametrize(("count", "visible"), [(0, None), (2, ""), (2, "-1")])
def test_without_a_gpu_the_metrics_are_absent(
    monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None
) -> None:
    assert gpu_series(monkeypatch, count=count, visible=visible) == {}


# --- the processes of `paceline train`


def test_every_process_of_a_run_has_a_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = cli_configs.config(
        telemetry={"prometheus_port": 9464}, rollout={"replicas": 2}, learner={"world_size": 2}
    )
    machine = Machine(num_cores=4, gpus=())
    controller = plan.controller(config, Path("r"), Path("a"))
    members = plan.members(config, machine, controller_address="c:1", master_port=1)
    targets = plan.scrape_targets([controller, *members])
    assert [(t["targets"], t["labels"]["process"]) for t in targets] == [
        (["127.0.0.1:9464"], "controller"),
        (["127.0.0.1:9465"], "rollout-0"),
        (["127.0.0.1:9466"], "rollout-1"),
        (["127.0.0.1:9467"], "learner-0"),
        (["127.0.0.1:9468"], "learner-1"),
        (["127.0.0.1:9469"], "reward"),
    ]
    # A port in the launcher's own environment would go to all of them.
    monkeypatch.setenv(prometheus.PORT, "7000")
    assert plan.controller(config, Path("r"), Path("a")).env[prometheus.PORT] == "7000"
    monkeypatch.setenv(prometheus.PORT, "0")
    assert plan.scrape_targets([plan.controller(config, Path("r"), Path("a"))]) == []
