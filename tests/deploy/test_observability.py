"""A real run under Prometheus: each process is scraped, each number of metrics.jsonl arrives."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from paceline.service.observability import metrics
from paceline.sizing.machine import free_port
from support.otlp_collector import Collector, ReceivedSpan, collector
from support.prometheus_server import PrometheusServer, program, prometheus_server
from support.training_run import ROOT, TrainingRun, prepare_inputs, tiny_config, training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2700)]

EXPORTED = ROOT / "deploy" / "observability" / "exported-metrics.txt"
PROCESSES = ["controller", "rollout-0", "learner-0", "learner-1", "reward"]
# The guard judges the first steps against bounds that they exceed, so that its alerts have a cause.
SECTIONS = {
    "trainer": {"name": "tiny", "total_steps": 8, "save_freq": 4, "test_freq": 4},
    "rollout": {"n": 4, "max_num_seqs": 16, "max_groups_in_flight": 2},
    "broker": {"blob_stores": 1},
    "guard": {"reference_kl": {"warn": 0.0}},
}


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A finished run, the Prometheus that has watched it, and the collector of its spans."""

    run: TrainingRun
    server: PrometheusServer
    collector: Collector

    def largest(self, metric: str) -> float:
        """The largest value that any series of a metric ever had."""
        return max(value for _, value in self.server.values(f"max_over_time({metric}[10m])"))


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """Eight steps; in step 2 the reward service is killed, for whose return the run waits."""
    folder = tmp_path_factory.mktemp("observed")
    program("prometheus")
    inputs = prepare_inputs(folder, num_train=128, num_val=8)
    config = folder / "prometheus.yaml"
    config.write_text(yaml.safe_dump(_prometheus_config(folder)))
    path = f"{ROOT / 'tests/support/fake_nvml'}:{os.environ.get('PYTHONPATH', '')}"
    with (
        pytest.MonkeyPatch.context() as patch,
        collector() as kept,
        prometheus_server(config, folder / "tsdb") as server,
    ):
        patch.setenv("PYTHONPATH", path)
        overrides = f"telemetry.prometheus_port={free_port()}", f"telemetry.otlp_endpoint={kept.endpoint}"
        with training(tiny_config(inputs, **SECTIONS), folder / "run", *overrides) as run:
            run.wait_for(
                lambda e: e["event"] == "phase" and (e["to"], e["step"]) == ("collect", 2), timeout_s=1200
            )
            server.wait_for(lambda: _up(server) == set(PROCESSES), "all targets are up")
            run.kill_group("reward")
            assert run.finish(timeout_s=1200) == 0, run.output
            yield Observed(run=run, server=server, collector=kept)


def test_every_process_was_scraped(observed: Observed) -> None:
    server = observed.server
    memory = server.values('max_over_time(paceline_process_resident_memory_bytes{part="self"}[10m])')
    assert {labels["process"] for labels, _ in memory} == set(PROCESSES)
    assert {(labels["service_name"], labels["service_instance_id"]) for labels, _ in memory} == {
        ("paceline.controller", "controller"),
        ("paceline.rollout", "rollout-0"),
        ("paceline.learner", "learner-0"),
        ("paceline.learner", "learner-rank1"),
        ("paceline.reward", "reward-0"),
    }
    assert all(value > 50e6 for _, value in memory)


def test_the_numbers_are_those_of_the_run(observed: Observed) -> None:
    rows, different = observed.run.metrics, 0
    for name in sorted({name for row in rows for name in row} - {"step", "time"}):
        metric = "paceline_training_" + re.sub(r"\W", "_", name)
        (seen,) = observed.server.ask("query", query=f"{metric}[10m]")["result"]
        values = {float(value) for _, value in seen["values"]}
        assert values <= {row[name] for row in rows if row.get(name) is not None}, name
        different += len(values) > 1
    assert different > 20, "the numbers of one step only were seen"
    assert observed.largest("paceline_training_step") >= 6


def test_the_loss_of_a_service_shows(observed: Observed) -> None:
    largest = observed.largest
    assert largest('paceline_member_restarts_total{member="reward-0"}') == 1
    assert largest('paceline_member_restarts_total{member="rollout-0"}') == 0
    assert largest('paceline_member_changes_total{kind="reward",change="dead"}') >= 1
    assert 0 < largest('paceline_member_recovery_seconds{member="reward-0"}') < 120


def test_health_and_gpus_show(observed: Observed) -> None:
    largest = observed.largest
    assert largest('paceline_trajectories_total{verdict="admitted"}') >= 64
    assert largest('paceline_heartbeats_total{result="answered"}') > 5
    assert largest("paceline_journal_term") == 1
    assert largest("paceline_gpu_power_watts") == 300
    with_gpus = "count by (service_name) (max_over_time(paceline_gpu_power_watts[10m]))"
    services = {labels["service_name"] for labels, _ in observed.server.values(with_gpus)}
    assert services == {"paceline.rollout", "paceline.learner"}


def test_a_guard_threshold_that_is_crossed_raises_its_alert(observed: Observed) -> None:
    firing = 'max_over_time(ALERTS{alertstate="firing",alertname=~"PacelineGuard.*"}[10m])'
    assert "PacelineGuardReferenceKl" in {labels["alertname"] for labels, _ in observed.server.values(firing)}


def test_each_step_is_one_trace_over_all_services(observed: Observed) -> None:
    by_trace: dict[str, list[ReceivedSpan]] = defaultdict(list)
    for span in observed.collector.spans:
        by_trace[span.trace_id].append(span)
    roots = {
        span.attributes["paceline.step"]: span for span in observed.collector.spans if span.name == "step"
    }
    assert sorted(roots) == list(range(1, 9))
    assert len({root.trace_id for root in roots.values()}) == 8
    # In steps 2 and 3 spans of the killed service may be missing, and with them parents of others.
    for step in (1, *range(4, 9)):
        spans = by_trace[roots[step].trace_id]
        assert {span.service for span in spans} == {
            "paceline.controller",
            "paceline.rollout",
            "paceline.reward",
            "paceline.learner",
        }
        by_id = {span.span_id: span for span in spans}
        parents = {(span.name, by_id[span.parent_id].name) for span in spans if span is not roots[step]}
        assert roots[step].parent_id == ""
        assert {
            ("dispatch", "step"),
            ("collect", "step"),
            ("learn", "step"),
            ("publish", "step"),
            ("commit", "step"),
            ("rollout.generate", "dispatch"),
            ("reward.score", "rollout.generate"),
            ("paceline.rpc.v1.LearnerService/TrainStep", "learn"),
            ("learner.train_step", "paceline.rpc.v1.LearnerService/TrainStep"),
            ("paceline.rpc.v1.RolloutService/ReceiveWeights", "publish"),
        } <= parents


def test_the_exported_names_are_the_committed_ones(observed: Observed) -> None:
    """Dashboards and alerts are checked against this file; write it anew with PACELINE_WRITE_NAMES=1."""
    without_tls = observed.server.names()
    names = "".join(f"{name}\n" for name in sorted({*without_tls, metrics.CERTIFICATE_LIFE.name}))
    if os.environ.get("PACELINE_WRITE_NAMES"):
        EXPORTED.write_text(names)
    assert names == EXPORTED.read_text()


def _prometheus_config(folder: Path) -> dict[str, object]:
    targets = [str(folder / "run" / "prometheus-targets.json")]
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ROOT / "deploy" / "observability" / "rules" / "*.yaml")],
        "scrape_configs": [
            {"job_name": "paceline", "file_sd_configs": [{"files": targets, "refresh_interval": "1s"}]}
        ],
    }


def _up(server: PrometheusServer) -> set[str]:
    return {labels["process"] for labels, value in server.values("up") if value == 1}
