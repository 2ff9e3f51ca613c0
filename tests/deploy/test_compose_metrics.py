"""A run in containers as Prometheus and a collector of traces see it; containers added meanwhile included."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from support import compose_stack
from support.compose_stack import DOCKER, FOLDER, Stack
from support.otlp_collector import ReceivedSpan, collector
from support.prometheus_server import PrometheusServer, program, prometheus_server

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]

STEPS = ("trainer.total_steps=20", "trainer.test_freq=0", "trainer.save_freq=0", "data.val_files=[]")
SERVICES = {"paceline.controller", "paceline.learner", "paceline.rollout", "paceline.reward"}
MEMBERS = {"controller": 1, "learner": 1, "rollout": 2, "reward": 1}


@pytest.fixture
def stack() -> Iterator[Stack]:
    why = compose_stack.lacking()
    if why:
        pytest.skip(why)
    program("prometheus")
    stack = Stack()
    try:
        stack.prepare("0", "sft.steps=60")
        yield stack
    finally:
        left = stack.remove()
    assert left == []


def test_prometheus_scrapes_every_container_and_each_step_is_one_trace(stack: Stack, tmp_path: Path) -> None:
    with contextlib.ExitStack() as resources:
        resources.enter_context(stack.settings("scraped", *STEPS))
        stack.compose("up", "--detach", "redis")
        config = local_config(stack, tmp_path)
        server = resources.enter_context(prometheus_server(config, tmp_path / "tsdb"))
        kept = resources.enter_context(collector(host=stack.gateway()))
        resources.enter_context(stack.up("scraped", *STEPS, OTLP_ENDPOINT=kept.endpoint))
        stack.wait_for(
            "step 1",
            lambda events: any(e["event"] == "step" and e["step"] >= 1 for e in events),
            300.0,
        )
        stack.scale(rollout=2)

        def all_are_up() -> bool:
            for service in MEMBERS:
                targets(tmp_path, service).write_text(json.dumps(addresses(stack, service)))
            return up(server) == MEMBERS

        server.wait_for(all_are_up, f"as many targets up: {MEMBERS}", timeout_s=120)
        server.wait_for(
            lambda: any(value >= 2 for _, value in server.values("paceline_training_step")),
            "the numbers of step 2",
            timeout_s=120,
        )
        kinds = "count by (service_name) (paceline_process_open_files)"
        assert {labels["service_name"]: value for labels, value in server.values(kinds)} == {
            "paceline.controller": 1,
            "paceline.rollout": 2,
            "paceline.learner": 1,
            "paceline.reward": 1,
        }
        assert stack.exit_code("follow", 500.0) == 0, stack.logs()
        last = max(event["step"] for event in stack.lines("events.jsonl") if event["event"] == "step")
    assert steps_by_trace(kept.spans) == dict.fromkeys(range(1, last + 1), SERVICES)


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
