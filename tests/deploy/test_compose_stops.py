"""Containers that are told to end in the middle of a step: by compose, with the engine, and Redis alone.

Needs a Docker daemon and the images of deploy/compose/build.sh. Each test takes minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.service.member.runtime import EXIT_INTERRUPTED
from support.compose_stack import DOCKER, IMAGES, Stack

pytestmark = [pytest.mark.containers, pytest.mark.timeout(3600)]

# A run that is told to end must not be done before that, on a busy machine either.
NUM_STEPS = 16
# Nothing is saved but at a stop and at the end.
RUN = (
    f"trainer.total_steps={NUM_STEPS}", "trainer.test_freq=0", "trainer.save_freq=0", "data.val_files=[]",
    "data.train_batch_size=32", "rollout.n=4", "service.startup_timeout_s=1200",
)  # fmt: skip
SERVICES = ("controller", "learner", "rollout", "reward")
START_S = 1200.0
# Restarts the Docker daemon, say `systemctl restart docker`.
RESTART_ENGINE = os.environ.get("RESTART_ENGINE", "")

Events = list[dict[str, Any]]


def of(events: Events, kind: str) -> Events:
    return [event for event in events if event["event"] == kind]


def steps(events: Events) -> list[int]:
    """The steps that are finished, of which none may be missing or be there twice."""
    done = [int(event["step"]) for event in of(events, "step")]
    assert done == [done[0] + number for number in range(len(done))], done
    return done


def in_middle_of(stack: Stack, step: int) -> int:
    """Waits until a step is collected or trained on; returns the step that is in progress then."""

    def begun(events: Events) -> bool:
        return any(event["step"] >= step and event["to"] == "collect" for event in of(events, "phase"))

    ends = len(of(stack.lines("events.jsonl"), "end"))
    stack.wait_for(f"step {step} is under way", begun, START_S, ends)
    return int(max(event["step"] for event in of(stack.lines("events.jsonl"), "phase")))


def inspect(stack: Stack, service: str) -> dict[str, Any]:
    (description,) = json.loads(docker("inspect", stack.containers(service)[0]))
    return dict(description)


def docker(*words: str) -> str:
    return subprocess.run([DOCKER, *words], capture_output=True, text=True, check=True, timeout=120).stdout


def check_saved(stack: Stack, step: int) -> int:
    """That the last start ended after a whole step, at least this one, and kept it; returns that step."""
    events = stack.lines("events.jsonl")
    done = steps(events)
    assert step <= done[-1] < NUM_STEPS, done
    assert of(events, "checkpoint")[-1]["step"] == done[-1], of(events, "checkpoint")
    return int(done[-1])


def check_whole(stack: Stack) -> None:
    """That the run has ended well and has every step once."""
    assert stack.exit_code("follow", START_S) == 0, stack.logs()
    for service in SERVICES:
        assert stack.exit_code(service, 300.0) == 0, stack.logs()
    events = stack.lines("events.jsonl")
    assert not of(events, "rewind"), "a step was done twice"
    assert steps(events)[-1] == NUM_STEPS
    checked = stack.in_volumes("paceline", "verify", f"runs/{stack.run}", check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    print(checked.stdout)


def test_nothing_is_lost_by_stop_and_down(stack: Stack) -> None:
    with stack.up("stopped", *RUN):
        step = in_middle_of(stack, 2)
        began = time.monotonic()
        stack.compose("stop", timeout_s=900.0)
        codes = {service: stack.exit_code(service, 10.0) for service in SERVICES}
        assert set(codes.values()) == {EXIT_INTERRUPTED}, f"{codes}\n{stack.logs()}"
        assert stack.exit_code("redis", 10.0) == 0
        saved = check_saved(stack, step)
        print(f"stop in step {step}: saved step {saved} after {time.monotonic() - began:.0f} s")

        stack.scale()
        step = in_middle_of(stack, saved + 2)
        # No container is left that could show its files: those of the next start do.
        began = time.monotonic()
        stack.compose("down", timeout_s=900.0)
        took = time.monotonic() - began
        assert stack.containers() == []
        stack.scale()
        done = steps(stack.lines("events.jsonl"))
        assert done[-1] >= step, "the step in progress was lost"
        print(f"down in step {step}: went on after step {done[-1]}, {took:.0f} s")
        check_whole(stack)


def test_all_containers_at_once_and_without_names_lose_nothing(stack: Stack) -> None:
    """As `helm uninstall` does it: it removes the Services, and with them the names, before the pods."""
    if os.geteuid() != 0:
        pytest.skip("the containers' resolv.conf can be changed by root only")
    with stack.up("nameless", *RUN):
        step = in_middle_of(stack, 2)
        containers = [stack.containers(service)[0] for service in (*SERVICES, "redis")]
        files = [
            Path(docker("inspect", "--format", "{{.ResolvConfPath}}", each).strip()) for each in containers
        ]
        before = [file.read_text() for file in files]
        for file in files:
            file.write_text("nameserver 127.0.0.1\noptions attempts:1 timeout:1\n")
        began = time.monotonic()
        docker("kill", "--signal", "TERM", *containers)
        codes = {service: stack.exit_code(service, 600.0) for service in SERVICES}
        assert set(codes.values()) == {EXIT_INTERRUPTED}, codes
        assert stack.exit_code("redis", 60.0) == 0
        saved = check_saved(stack, step)
        print(f"SIGTERM in step {step}: saved step {saved} after {time.monotonic() - began:.0f} s")
        for file, text in zip(files, before, strict=True):
            file.write_text(text)
        stack.compose("start", "redis", "controller", "reward", "learner", "rollout")
        for service in SERVICES:
            assert stack.exit_code(service, START_S) == 0, stack.logs()
        stack.scale()
        check_whole(stack)


def test_a_redis_that_is_started_again_in_mid_step_ends_nothing(stack: Stack) -> None:
    with stack.up("redis", *RUN):
        step = in_middle_of(stack, 2)
        before = inspect(stack, "redis")["State"]["StartedAt"]
        began = time.monotonic()
        stack.compose("restart", "-t", "5", "redis")
        print(f"restart in step {step}: {time.monotonic() - began:.0f} s")
        assert inspect(stack, "redis")["State"]["StartedAt"] > before
        check_whole(stack)
        assert {stack.starts(service) for service in SERVICES} == {0}


@pytest.mark.skipif(not RESTART_ENGINE, reason="RESTART_ENGINE names no command that restarts the engine")
def test_a_run_goes_on_with_its_engine_and_one_that_has_ended_stays_away(stack: Stack) -> None:
    with stack.up("engine", *RUN):
        print(f"the engine ends in step {in_middle_of(stack, 2)}")
        subprocess.run(RESTART_ENGINE, shell=True, check=True, timeout=900)
        # `follow` is none of the run's services.
        for service in SERVICES:
            assert stack.exit_code(service, START_S) == 0, stack.logs()
        stack.scale()
        check_whole(stack)
        ended = {service: inspect(stack, service)["State"]["FinishedAt"] for service in SERVICES}
        subprocess.run(RESTART_ENGINE, shell=True, check=True, timeout=900)
        end = time.monotonic() + 120
        while inspect(stack, "redis")["State"]["Status"] != "running":
            assert time.monotonic() < end, stack.logs()
            time.sleep(1.0)
        time.sleep(20.0)
        assert {service: inspect(stack, service)["State"]["FinishedAt"] for service in SERVICES} == ended


def test_what_a_container_may_use_is_what_env_says(stack: Stack) -> None:
    limits = {
        "CONTROLLER_MEMORY": "3g", "LEARNER_MEMORY": "5g", "ROLLOUT_MEMORY": "7g", "REWARD_MEMORY": "2g",
        "REDIS_MEMORY": "1g", "TMP_SIZE": "300m", "CACHE_SIZE": "2g", "SHM_SIZE": "400m",
    }  # fmt: skip
    with stack.settings("limited", *RUN, "trainer.total_steps=1", **limits):
        stack.scale()
        gib = 1 << 30
        expected = {"controller": 3, "learner": 5, "rollout": 7, "reward": 2, "redis": 1}
        for service, memory in expected.items():
            host = inspect(stack, service)["HostConfig"]
            assert host["Memory"] == memory * gib, service
            assert host["PidsLimit"] == 16384
        words = ("df", "--output=target,size", "/tmp", "/cache", "/dev/shm")
        words = docker("exec", stack.containers("rollout")[0], *words).split()[3:]  # without the header
        sizes = {name: int(size) for name, size in zip(words[::2], words[1::2], strict=True)}
        assert sizes == {"/tmp": 300 << 10, "/cache": 2 << 20, "/dev/shm": 400 << 10}
        assert stack.exit_code("follow", START_S) == 0, stack.logs()


def test_images_say_of_which_version_they_are(stack: Stack) -> None:
    """Those of one build say the same."""
    described = {json.dumps(of_image(image)) for image in IMAGES}
    assert len(described) == 1
    version, revision = json.loads(described.pop())
    for image in IMAGES:
        service = image.removeprefix("paceline/").partition(":")[0]
        if service in SERVICES:
            said = docker("run", "--rm", "--network", "none", image, "--version")
            assert said.strip() == f"paceline.{service} of paceline {version} ({revision})"


def of_image(image: str) -> list[str]:
    """Version and revision, by its labels."""
    (description,) = json.loads(docker("image", "inspect", image))
    labels = description["Config"]["Labels"]
    return [labels[f"org.opencontainers.image.{name}"] for name in ("version", "revision")]
