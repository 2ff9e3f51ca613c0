"""The run in containers: the demo to its end, ends that no start would mend, every container killed once.

Needs a Docker daemon and the images of deploy/compose/build.sh. Each test takes minutes.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support import compose_scan, escapes
from support.compose_stack import FOLDER, Stack

pytestmark = [pytest.mark.containers, pytest.mark.timeout(4500)]

# Servers that load where others have the cores: the run waits for them, too.
PATIENCE = "service.startup_timeout_s=1200"
SHORT = ("trainer.total_steps=8", "trainer.test_freq=8", "trainer.save_freq=2", PATIENCE)
# Small steps: a run that is long enough for its containers to come and go.
_SMALL = (
    "trainer.test_freq=0",
    "trainer.save_freq=4",
    "data.val_files=[]",
    "data.train_batch_size=32",
    "rollout.n=4",
    PATIENCE,
)
LONG = ("trainer.total_steps=50", *_SMALL)
# Deadlines only catch what hangs: containers start slowly where other work has the cores.
END_S = 1500.0

Events = list[dict[str, Any]]


def finished(events: Events) -> int:
    """The last step that is finished."""
    return max((event["step"] for event in events if event["event"] == "step"), default=-1)


def verify(stack: Stack) -> None:
    checked = stack.in_volumes("paceline", "verify", f"runs/{stack.run}", check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    print(checked.stdout)


def test_the_demo_trains_and_every_container_ends(stack: Stack) -> None:
    with stack.settings("demo", *SHORT):
        trained = stack.train(END_S)
        print(trained.stdout[-3000:])
        assert trained.returncode == 0, trained.stdout + trained.stderr + stack.logs()
        for service in ("controller", "learner", "rollout", "reward"):
            assert stack.exit_code(service, 300.0) == 0, stack.logs()
            assert stack.starts(service) == 0
        rewards = {
            line["step"]: line["val/reward/mean"]
            for line in stack.lines("metrics.jsonl")
            if "val/reward/mean" in line
        }
        print(rewards)
        assert rewards[8] > rewards[0] + 0.02
        verify(stack)
    assert stack.containers() == []


def test_what_a_start_cannot_mend_is_not_started_again(stack: Stack) -> None:
    """A configuration that cannot be used, and a run that a guard rule ends in its first step."""
    for run, overrides in (
        ("refused", ("trainer.total_steps=-1",)),
        ("guarded", (*LONG, "guard.reference_kl.stop=0.0", "guard.reference_kl.patience=1")),
    ):
        with stack.settings(run, *overrides):
            trained = stack.train(END_S)
            assert trained.returncode == 1, trained.stdout + trained.stderr + stack.logs()
            assert stack.exit_code("controller", 300.0) == 0
            assert stack.starts("controller") == 0
            said = stack.logs()
            assert "paceline.controller ended with exit code" in said
            if run == "guarded":
                assert {stack.exit_code(name, 300.0) for name in ("learner", "rollout", "reward")} == {0}
                ends = [event for event in stack.lines("events.jsonl") if event["event"] == "end"]
                print(ends)
                assert [event["ok"] for event in ends] == [False]


# What the profile colocated has, for containers without GPUs.
SHARING = """
services:
  processes: {profiles: [cpu]}
  learner: {pid: "service:processes", depends_on: {processes: {condition: service_started}}}
  rollout: {pid: "service:processes", depends_on: {processes: {condition: service_started}}}
"""


def test_a_push_goes_through_memory_that_containers_share(stack: Stack, tmp_path: Path) -> None:
    file = tmp_path / "sharing.yaml"
    file.write_text(SHARING)
    steps = ("trainer.total_steps=2", *_SMALL, "weights.backend=shared")
    with stack.settings("sharing", *steps, file=file):
        trained = stack.train(END_S)
        assert trained.returncode == 0, trained.stdout + trained.stderr + stack.logs()
        pushed = [line["weights/bytes"] for line in stack.lines("metrics.jsonl")]
        print(pushed)
        verify(stack)


# Runs tests/support/escapes.py as a program that a model wrote, beside a port and a file of the container.
ATTEMPTS = """
import asyncio, pathlib, socket
from paceline.service.confinement.confined import Command, ConfinedLimits, python, run_confined
pathlib.Path("/tmp/own").write_text("the container's")
with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
    abstract.bind(chr(0) + "own")
    abstract.listen()
    words = [python(), "-I", "-B", "/tmp/program.py", "/tmp/own", str(server.getsockname()[1]), "own"]
    program = pathlib.Path("/support/escapes.py").read_text()
    limits = ConfinedLimits(seconds=60.0)
    outcome = asyncio.run(run_confined(Command(words=words, files={"program.py": program}, limits=limits)))
print(outcome.stdout.decode(), outcome.stderr.decode())
"""


def test_the_reward_container_confines_code_with_its_profile_only(stack: Stack) -> None:
    """What `paceline doctor` says of it, and what programs try."""
    mount = f"{Path(escapes.__file__).parent}:/support:ro"

    def run(*words: str) -> str:
        return stack.compose(
            "run", "--rm", "--no-deps", "--volume", mount, "--entrypoint", *words, check=False
        )

    def doctor() -> str:
        """Without the line breaks of its table."""
        return " ".join(run("paceline", "reward", "doctor").split())

    said = doctor()
    assert "unshare: Operation not permitted" in said, said
    assert "confined.yaml" in said
    with stack.settings("confined", file=FOLDER / "confined.yaml"):
        assert "yes, for reward.code" in doctor()
        lines = run("python", "reward", "-c", ATTEMPTS).split("\n")
        tried = [line for line in lines if line.startswith(("no ", "THROUGH "))]
        assert tried == [f"no {name}" for name in escapes.ATTEMPTS], lines
        print(f"{len(tried)} attempts, none got through")


def look_from_outside(stack: Stack) -> None:
    """Rights, secrets and ports of a run that trains."""
    running = compose_scan.containers(stack.containers())
    services = {container.service for container in running}
    assert services == {"controller", "learner", "rollout", "reward", "redis", "follow"}
    for container in running:
        rights = {name: container.status[name] for name in ("CapEff", "CapBnd", "NoNewPrivs")}
        assert rights == {"CapEff": "0" * 16, "CapBnd": "0" * 16, "NoNewPrivs": "1"}, container.service
        assert container.status["Uid"] in ("10001", "999")
        assert not container.writes_root, container.service
        assert not any(secret in container.description for secret in compose_scan.secrets())
    listens = {container.service: container.listens for container in running}
    assert listens["controller"] == listens["reward"] == {7000, 9464}
    assert listens["redis"] == {6379}
    assert listens["follow"] == set()
    published = [place for container in running for place in container.published]
    assert [host for host, _ in published] == ["127.0.0.1"]
    # Who is on the run's network reaches every port, who is on another network of this machine none.
    places = {place for container in running for place in container.places}
    silent, inside, end = services, set[str](), time.monotonic() + 300
    while silent:
        assert time.monotonic() < end, silent
        inside |= compose_scan.answering(places, f"{stack.project}_run")
        silent = {each.service for each in running if each.listens and not inside & each.places}
    assert all(compose_scan.answers_here(host, port) for host, port in published)
    here = {f"{compose_scan.gateway('bridge')}:{port}" for _, port in published}
    assert compose_scan.answering(places | here, "bridge") == set()
    print(f"{len(places)} ports of {len(running)} containers, none reached from another network")


def test_each_container_killed_once(stack: Stack) -> None:
    with stack.up("killed", *LONG, scale={"rollout": 2}):
        stack.wait_for("the first step", lambda events: finished(events) >= 1, 1200.0)
        look_from_outside(stack)
        for number, service in enumerate(("rollout", "reward", "learner", "redis", "controller")):
            step = finished(stack.lines("events.jsonl"))
            stack.wait_for(
                f"a step before {service} is killed",
                lambda events, step=step: finished(events) > step,
                1200.0,
            )
            before = stack.starts(service)
            stack.kill(service)
            print(f"{number}: killed {service} after step {finished(stack.lines('events.jsonl'))}")
            stack.wait_for(
                f"{service} starts again", lambda _, s=service, n=before: stack.starts(s) > n, 600.0
            )
        assert stack.exit_code("follow", END_S) == 0, stack.logs()
        verify(stack)


# A tiny model with one label, beside the starting model.
WRITE_RM = """
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
torch.manual_seed(0)
start, path = "models/arithmetic/start", "models/arithmetic/rm"
AutoModelForSequenceClassification.from_pretrained(start, num_labels=1).save_pretrained(path)
AutoTokenizer.from_pretrained(start).save_pretrained(path)
"""
RM = {
    "name": "rm", "address": "reward-model-server:7000", "token_file": "/run/secrets/token", "concurrency": 1,
    "timeout_s": 120, "weight": 0.1,
}  # fmt: skip
CALLED = "services: {reward-model-server: {profiles: [cpu]}}"
ATTACHED = """
services:
  reward-model:
    profiles: [cpu]
    command: models/arithmetic/rm --name rm --attach reward:7000 --every-address
"""


@pytest.mark.parametrize(
    ("run", "services", "reward"),
    [
        ("called", CALLED, f"reward.services={json.dumps([RM])}"),
        ("attached", ATTACHED, "reward.attached=[{name: rm, timeout_s: 120, weight: 0.1}]"),
    ],
)
def test_two_reward_services_share_one_reward_model_and_one_is_killed(
    stack: Stack, tmp_path: Path, run: str, services: str, reward: str
) -> None:
    stack.compose("run", "--rm", "--entrypoint", "python", "prepare", "-c", WRITE_RM)
    file = tmp_path / "models.yaml"
    file.write_text(services)
    overrides = ("trainer.total_steps=12", *_SMALL, f"'{reward}'")
    with stack.settings(run, *overrides, file=file, REWARD_MODEL_PATH="models/arithmetic/rm"):
        stack.scale(reward=2)
        stack.wait_for("two steps", lambda events: finished(events) >= 2, 1200.0)
        stack.kill("reward")
        print(f"killed a reward service after step {finished(stack.lines('events.jsonl'))}")
        stack.wait_for("it starts again", lambda _: stack.starts("reward") > 0, 600.0)
        assert stack.exit_code("follow", END_S) == 0, stack.logs()
        steps = [line for line in stack.lines("metrics.jsonl") if "reward/rm/mean" in line]
        assert [line["step"] for line in steps] == list(range(1, 13))
        assert {line["barrier/groups_dropped"] for line in steps} == {0.0}
        assert all(line["reward/rm/std"] > 0 for line in steps)
        scored = Counter(
            span["instance"]
            for span in stack.lines("spans.jsonl")
            for _ in range(span["attributes"].get("num_items", 0))
            if span["name"] == "reward.score"
        )
        print(scored)
        assert len(scored) >= 2
        verify(stack)
