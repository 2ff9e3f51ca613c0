"""Members come and go while a run in containers goes on, as Prometheus and a collector of traces see it."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.compose_stack import DOCKER, FOLDER, Stack
from support.otlp_collector import ReceivedSpan, collector
from support.prometheus_server import PrometheusServer, program, prometheus_server

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]

# Small steps, and enough of them for servers to start meanwhile.
STEPS = (
    "trainer.total_steps=90",
    "trainer.test_freq=0",
    "trainer.save_freq=0",
    "data.val_files=[]",
    "data.train_batch_size=32",
    "rollout.n=4",
)
SERVICES = {"paceline.controller", "paceline.learner", "paceline.rollout", "paceline.reward"}


def test_members_come_and_go_seen_by_prometheus_and_a_collector(stack: Stack, tmp_path: Path) -> None:
    program("prometheus")
    with contextlib.ExitStack() as resources:
        resources.enter_context(stack.settings("scaled", *STEPS))
        stack.compose("up", "--detach", "redis")
        config = local_config(stack, tmp_path)
        server = resources.enter_context(prometheus_server(config, tmp_path / "tsdb"))
        kept = resources.enter_context(collector(host=stack.gateway()))
        resources.enter_context(stack.up("scaled", *STEPS, OTLP_ENDPOINT=kept.endpoint))
        stack.wait_for("step 1", lambda events: finished(events) >= 1, 400.0)
        certificate = stack.in_volumes("cat", "tls/rollout/cert.pem").stdout
        stack.scale(rollout=3, reward=2)
        stack.wait_for("three servers hold the policy", lambda events: len(holders(events)) == 3, 400.0)
        assert stack.in_volumes("cat", "tls/rollout/cert.pem").stdout == certificate
        wait_until_up(server, stack, tmp_path, rollout=3, reward=2)
        kinds = "count by (service_name) (paceline_process_open_files)"
        assert {labels["service_name"]: value for labels, value in server.values(kinds)} == {
            "paceline.controller": 1,
            "paceline.rollout": 3,
            "paceline.learner": 1,
            "paceline.reward": 2,
        }
        assert any(value >= 1 for _, value in server.values("paceline_training_step"))
        stack.scale(rollout=1, reward=1)
        stack.wait_for("one server holds the policy", lambda events: len(holders(events)) == 1, 240.0)
        wait_until_up(server, stack, tmp_path, rollout=1, reward=1)
        assert stack.exit_code("follow", 500.0) == 0, stack.logs()
        last = finished(stack.lines("events.jsonl"))
        checked = stack.in_volumes("paceline", "verify", "runs/scaled", check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        print(checked.stdout)
    assert last == 90
    assert steps_by_trace(kept.spans) == dict.fromkeys(range(1, last + 1), SERVICES)


def finished(events: list[dict[str, Any]]) -> int:
    """The last step that is finished."""
    return max((event["step"] for event in events if event["event"] == "step"), default=-1)


def holders(events: list[dict[str, Any]]) -> set[str]:
    """The servers that hold the newest version."""
    servers: set[str] = set()
    for event in events:
        if event["event"] == "commit":
            servers = set(event["servers"])
        elif event["event"] == "newcomers":
            servers |= set(event["servers"])
    return servers


def wait_until_up(server: PrometheusServer, stack: Stack, folder: Path, **scaled: int) -> None:
    """Waits until so many containers are scraped, and no other."""
    wanted = {"controller": 1, "learner": 1, **scaled}

    def all_are_up() -> bool:
        for service in wanted:
            targets(folder, service).write_text(json.dumps(addresses(stack, service)))
        return up(server) == wanted

    server.wait_for(all_are_up, f"as many targets up: {wanted}", timeout_s=180)


def steps_by_trace(spans: list[ReceivedSpan]) -> dict[int, set[str]]:
    """The services of each step's one trace."""
    roots = {span.trace_id: span.attributes["paceline.step"] for span in spans if span.name == "step"}
    assert len(set(roots.values())) == len(roots), "a step has several traces"
    services: dict[int, set[str]] = {step: set() for step in roots.values()}
    for span in spans:
        if span.trace_id in roots:
            services[roots[span.trace_id]].add(span.service)
    return services


def targets(folder: Path, service: str) -> Path:
    """The file with a service's addresses."""
    return folder / f"{service}.json"


def local_config(stack: Stack, folder: Path) -> Path:
    """Compose's own configuration of Prometheus for this machine, which cannot ask the containers' DNS."""
    tree = yaml.safe_load((FOLDER.parent / "observability" / "prometheus.yaml").read_text())
    tree["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    del tree["rule_files"]
    for file in ("ca.pem", "cert.pem", "key.pem"):
        (folder / file).write_text(stack.in_volumes("cat", f"tls/client-prometheus/{file}").stdout)
    for job in tree["scrape_configs"]:
        service = job["job_name"].removeprefix("paceline-")
        del job["dns_sd_configs"]
        targets(folder, service).write_text("[]")
        job["file_sd_configs"] = [{"files": [str(targets(folder, service))], "refresh_interval": "1s"}]
        job["tls_config"] |= {f"{name}_file": str(folder / f"{name}.pem") for name in ("ca", "cert", "key")}
    config = folder / "prometheus.yaml"
    config.write_text(yaml.safe_dump(tree))
    return config


def addresses(stack: Stack, service: str) -> list[dict[str, object]]:
    """A service's addresses on the run's network, as compose's own Prometheus would find them by DNS."""
    form = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}"
    answers: list[dict[str, object]] = []
    for container in stack.containers(service):
        words = [DOCKER, "inspect", "--format", form, container]
        ips = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout.split()
        # The controller is on a second network, too: either address leads to it.
        answers += [{"targets": [f"{ip}:9464"], "labels": {"service": service}} for ip in ips[:1]]
    return answers


def up(server: PrometheusServer) -> dict[str, int]:
    """How many targets of each service are up."""
    return {labels["service"]: int(value) for labels, value in server.values("sum by (service) (up)")}
