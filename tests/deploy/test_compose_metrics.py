"""Members come and go while a run in containers goes on, as Prometheus and a collector of traces see it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from paceline.sizing.machine import free_port
from support import compose_stack
from support.compose_stack import Stack
from support.otlp_collector import ReceivedSpan, collector
from support.prometheus_server import PrometheusServer

pytestmark = [pytest.mark.containers, pytest.mark.timeout(4500)]

# Steps as long as the demo's; the test ends the run once servers have started, taken part and ended.
STEPS = (
    "trainer.total_steps=100000",
    "trainer.test_freq=0",
    "trainer.save_freq=0",
    "data.val_files=[]",
    "service.startup_timeout_s=1200",
)
SERVICES = {"paceline.controller", "paceline.learner", "paceline.rollout", "paceline.reward"}


@pytest.fixture
def prometheus() -> str:
    """An image that the profile observability can start here; skips without it."""
    why = compose_stack.lacking((compose_stack.PROMETHEUS,))
    if why:
        pytest.skip(why)
    return compose_stack.PROMETHEUS


def test_members_come_and_go_seen_by_prometheus_and_a_collector(prometheus: str, stack: Stack) -> None:
    server = PrometheusServer(free_port())
    with contextlib.ExitStack() as resources:
        ours = {"PROMETHEUS_IMAGE": prometheus, "PROMETHEUS_UI_PORT": str(server.port)}
        resources.enter_context(stack.settings("scaled", *STEPS, **ours))
        stack.compose("--profile", "observability", "up", "--detach", "prometheus")
        kept = resources.enter_context(collector(host=stack.gateway()))
        resources.enter_context(stack.up("scaled", *STEPS, OTLP_ENDPOINT=kept.endpoint))
        stack.wait_for("step 1", lambda events: finished(events) >= 1, 1200.0)
        certificate = stack.in_volumes("cat", "tls/rollout/cert.pem").stdout
        wait_until_up(server, controller=1, learner=1, rollout=1, reward=1)
        stack.scale(rollout=3, reward=2)
        stack.wait_for("three servers hold the policy", lambda events: len(holders(events)) == 3, 1200.0)
        assert stack.in_volumes("cat", "tls/rollout/cert.pem").stdout == certificate
        wait_until_up(server, controller=1, learner=1, rollout=3, reward=2)
        kinds = "count by (service_name) (paceline_process_open_files)"
        assert {labels["service_name"]: value for labels, value in server.values(kinds)} == {
            "paceline.controller": 1,
            "paceline.rollout": 3,
            "paceline.learner": 2,  # its ranks
            "paceline.reward": 2,
        }
        assert any(value >= 1 for _, value in server.values("paceline_training_step"))
        assert {group["name"] for group in server.ask("rules")["groups"]} == {
            "paceline-guard",
            "paceline-services",
        }
        stack.scale(rollout=1, reward=1)
        stack.wait_for("one server holds the policy", lambda events: len(holders(events)) == 1, 1200.0)
        wait_until_up(server, controller=1, learner=1, rollout=1, reward=1)
        print(f"scaled back after step {finished(stack.lines('events.jsonl'))}")
        stop = ("paceline", "stop", "--controller", "127.0.0.1:7000")
        print(stack.compose("exec", "-T", "controller", *stop))
        for service in ("controller", "learner"):
            assert stack.exit_code(service, 600.0) == 0, stack.logs()
        last = finished(stack.lines("events.jsonl"))
        checked = stack.in_volumes("paceline", "verify", "runs/scaled", check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        print(checked.stdout)
    assert last >= 2
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


def wait_until_up(server: PrometheusServer, **wanted: int) -> None:
    """Waits until so many containers of each service are scraped, no other, and rank 1."""
    jobs = {f"paceline-{service}": number for service, number in wanted.items()}
    # Addresses of ranks that a learner of this size does not have are asked, too.
    ranks = {"paceline-learner-ranks": 1}

    def up() -> dict[str, int]:
        return {labels["job"]: int(value) for labels, value in server.values("sum by (job) (up)")}

    def targets() -> dict[str, int]:
        own = server.values('count by (job) (up{job!="paceline-learner-ranks"})')
        return {labels["job"]: int(value) for labels, value in own}

    server.wait_for(
        lambda: targets() == jobs and up() == jobs | ranks, f"as many targets up: {wanted}", timeout_s=600
    )


def steps_by_trace(spans: list[ReceivedSpan]) -> dict[int, set[str]]:
    """The services of each step's one trace."""
    roots = {span.trace_id: span.attributes["paceline.step"] for span in spans if span.name == "step"}
    assert len(set(roots.values())) == len(roots), "a step has several traces"
    services: dict[int, set[str]] = {step: set() for step in roots.values()}
    for span in spans:
        if span.trace_id in roots:
            services[roots[span.trace_id]].add(span.service)
    return services
