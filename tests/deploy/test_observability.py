"""A real run under Prometheus: each process is scraped, each number of metrics.jsonl arrives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from paceline.cli.launch.machine import free_port
from support.prometheus_server import PrometheusServer, program, prometheus_server
from support.training_run import ROOT, TrainingRun, prepare_inputs, tiny_config, training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

EXPORTED = ROOT / "deploy" / "observability" / "exported-metrics.txt"
PROCESSES = ["controller", "rollout-0", "rollout-1", "learner-0", "learner-1", "reward"]
# The guard judges the first steps against bounds that they exceed, so that its alerts have a cause.
SECTIONS = {
    "trainer": {"name": "tiny", "total_steps": 8, "save_freq": 4, "test_freq": 4},
    "rollout": {"n": 4, "max_num_seqs": 16, "max_groups_in_flight": 2, "replicas": 2},
    "guard": {"reference_kl": {"warn": 0.0}},
    "service": {"suspect_after_s": 2.0, "dead_after_s": 4.0},
}


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TrainingRun, PrometheusServer]]:
    """A finished run of eight steps, a server of which was killed, and the Prometheus that has watched it."""
    folder = tmp_path_factory.mktemp("observed")
    program("prometheus")
    inputs = prepare_inputs(folder, num_train=128, num_val=8)
    config = folder / "prometheus.yaml"
    config.write_text(yaml.safe_dump(_prometheus_config(folder)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT / 'tests/support/fake_nvml'}:{_pythonpath()}")
        with (
            prometheus_server(config, folder / "tsdb") as server,
            training(
                tiny_config(inputs, **SECTIONS), folder / "run", f"telemetry.prometheus_port={free_port()}"
            ) as run,
        ):
            run.wait_for_phase("collect", 2)
            server.wait_for(lambda: _up(server) == set(PROCESSES), "all targets are up")
            run.kill_group("rollout-1")
            assert run.finish(timeout_s=300) == 0, run.output
            yield run, server


def test_every_process_was_scraped(scraped: tuple[TrainingRun, PrometheusServer]) -> None:
    _, server = scraped
    memory = server.values('max_over_time(paceline_process_resident_memory_bytes{part="self"}[10m])')
    assert {labels["process"] for labels, _ in memory} == set(PROCESSES)
    assert {(labels["service_name"], labels["service_instance_id"]) for labels, _ in memory} == {
        ("paceline.controller", "controller"),
        ("paceline.rollout", "rollout-0"),
        ("paceline.rollout", "rollout-1"),
        ("paceline.learner", "learner-0"),
        ("paceline.learner", "learner-rank1"),
        ("paceline.reward", "reward-0"),
    }
    assert all(value > 50e6 for _, value in memory)


def test_the_numbers_are_those_of_the_run(scraped: tuple[TrainingRun, PrometheusServer]) -> None:
    run, server = scraped
    for row in run.metrics:
        for name, value in row.items():
            metric = "paceline_training_" + re.sub(r"\W", "_", name)
            seen = server.values(f"last_over_time({metric}[10m])")
            assert len(seen) == 1, f"{name} ({value}) of step {row['step']} was not exported: {seen}"
    last = {name: value for name, value in run.metrics[-2].items() if name.startswith("actor/")}
    assert last, "the run has no metrics of the actor"
    steps = server.values("max_over_time(paceline_training_step[10m])")
    assert steps[0][1] >= len(run.metrics) - 2


def test_the_loss_of_a_server_shows(scraped: tuple[TrainingRun, PrometheusServer]) -> None:
    run, server = scraped

    def largest(metric: str) -> float:
        return max(value for _, value in server.values(f"max_over_time({metric}[10m])"))

    assert largest('paceline_member_restarts_total{member="rollout-1"}') == 1
    assert largest('paceline_member_restarts_total{member="rollout-0"}') == 0
    assert largest('paceline_member_changes_total{kind="rollout",change="dead"}') == 1
    assert 0 < largest('paceline_member_recovery_seconds{member="rollout-1"}') < 120
    assert largest('paceline_trajectories_total{verdict="admitted"}') >= 64
    assert largest("paceline_gpu_power_watts") == 300
    with_gpus = server.values("count by (service_name) (max_over_time(paceline_gpu_power_watts[10m]))")
    assert {labels["service_name"] for labels, _ in with_gpus} == {"paceline.rollout", "paceline.learner"}
    assert run.events[0]["event"] == "run"


def test_the_exported_names_are_the_committed_ones(scraped: tuple[TrainingRun, PrometheusServer]) -> None:
    """Dashboards and alerts are checked against this file; write it anew with PACELINE_WRITE_NAMES=1."""
    _, server = scraped
    names = "".join(f"{name}\n" for name in sorted(server.names()))
    if _environment("PACELINE_WRITE_NAMES"):
        EXPORTED.write_text(names)
    assert names == EXPORTED.read_text()


def _prometheus_config(folder: Path) -> dict[str, object]:
    targets = [str(folder / "run" / "prometheus-targets.json")]
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [
            {"job_name": "paceline", "file_sd_configs": [{"files": targets, "refresh_interval": "1s"}]}
        ],
    }


def _up(server: PrometheusServer) -> set[str]:
    return {labels["process"] for labels, value in server.values("up") if value == 1}


def _environment(name: str) -> str:
    import os

    return os.environ.get(name, "")


def _pythonpath() -> str:
    return _environment("PYTHONPATH")
