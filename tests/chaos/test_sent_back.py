"""A step is trained and cannot be finished: its trajectories are lost with its controller. The learner is
sent back, starts again from its newest checkpoint, and the run is the one that nothing disturbed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis

from paceline.service import process_ends
from paceline.service.process import BROKER_URL
from support.training_run import (
    TRANSPORT,
    Row,
    TrainingRun,
    assert_same_metrics,
    assert_sound,
    only,
    training,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def lose_step(run: TrainingRun, wanted: Callable[[Row], bool]) -> None:
    """Empties Redis and kills the controller as soon as it has recorded an event, before it goes on.

    It runs in slices of a few milliseconds until then.
    """
    controller = psutil.Process(run.pid_of("controller"))
    controller.suspend()
    while not any(map(wanted, run.events)):
        controller.resume()
        time.sleep(0.005)
        controller.suspend()
    run.look()
    with redis.Redis.from_url(controller.environ()[BROKER_URL]) as server:
        server.flushall()
    os.kill(controller.pid, signal.SIGKILL)


def is_trained(step: int) -> Callable[[Row], bool]:
    return lambda e: e["event"] == "trained" and e["step"] == step


def test_a_learner_that_trained_what_cannot_be_finished_is_sent_back(
    config: dict[str, object], undisturbed: list[Row], tmp_path: Path
) -> None:
    with training(config, tmp_path / "run", "trainer.save_freq=3") as run:
        run.wait_for(is_trained(2))
        lose_step(run, is_trained(2))
        run.wait_for(is_trained(5))
        lose_step(run, lambda e: e["event"] == "commit" and e["version"] == 5)
        assert run.finish() == 0, run.output
        events = run.events
        assert [event["step"] for event in only(events, "lost")] == [2, 5]
        assert [event["to_step"] for event in only(events, "rewind")] == [0, 3]
        commits = [event["digest"] for event in only(events, "commit") if event["version"] == 5]
        assert (len(commits), len(set(commits))) == (2, 1), "the version that was void is trained again"
        assert_same_metrics(run.metrics, undisturbed, without=TRANSPORT)
        assert_sound(run)
        ends = list(process_ends.read(run.run_dir))
        killed, sent_back = ("controller", "killed by SIGKILL"), ("learner-0", "exit code 1")
        assert [(end.name, end.outcome) for end in ends] == [killed, sent_back] * 2
        assert [end.step for end in ends if end.name == "controller"] == [2, 5]
        for step in (2, 5):
            assert f"step {step} is trained but not finished, and the broker has lost" in run.output, (
                run.output
            )
