"""A run is killed with all that belongs to it: Prometheus, with the shipped rules and intervals, says so."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from paceline.sizing.machine import free_port
from support.prometheus_server import PrometheusServer, program, prometheus_server
from support.training_run import ROOT, prepare_inputs, tiny_config, training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

FOLDER = ROOT / "deploy" / "observability"
PROCESSES = {"controller", "rollout-0", "learner-0", "learner-1", "reward"}


def config(folder: Path, targets: Path) -> Path:
    """prometheus-local.yaml with its targets elsewhere."""
    shipped = yaml.safe_load((FOLDER / "prometheus-local.yaml").read_text())
    (job,) = shipped["scrape_configs"]
    job["file_sd_configs"][0]["files"] = [str(targets)]
    shipped["rule_files"] = [str(FOLDER / "rules" / "*.yaml")]
    folder.mkdir()
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(shipped))
    return folder / "prometheus.yaml"


def firing(server: PrometheusServer) -> set[str]:
    return {
        each["labels"]["alertname"] for each in server.ask("alerts")["alerts"] if each["state"] == "firing"
    }


def test_an_alert_fires_within_two_minutes_of_the_end_of_everything(tmp_path: Path) -> None:
    """In a Prometheus that has watched the run, and in one that begins after it and knows no target."""
    program("prometheus")
    inputs = prepare_inputs(tmp_path, num_train=80, num_val=8)
    targets = tmp_path / "run" / "prometheus-targets.json"
    watching, late = config(tmp_path / "watching", targets), config(tmp_path / "late", tmp_path / "none.json")
    settings = {"trainer": {"total_steps": 20}, "telemetry": {"prometheus_port": free_port()}}
    with (
        prometheus_server(watching, watching.parent / "tsdb") as server,
        training(tiny_config(inputs, **settings), tmp_path / "run", forked=True) as run,
    ):
        run.wait_for_phase("collect", 2)
        answering = 'up{job=~"paceline.*"} == 1'
        server.wait_for(
            lambda: {labels["process"] for labels, _ in server.values(answering)} == PROCESSES,
            "all are scraped",
        )
        assert "PacelineNothingAnswers" not in firing(server)
        run.end()
        killed = time.monotonic()
        with prometheus_server(late, late.parent / "tsdb") as other:
            for name, each in (("watching", server), ("late", other)):
                each.wait_for(
                    lambda each=each: "PacelineNothingAnswers" in firing(each),
                    f"an alert of the Prometheus that is {name}",
                    timeout_s=120.0 - (time.monotonic() - killed),
                )
                print(f"{name}: fires {time.monotonic() - killed:.0f} s after everything was killed")
