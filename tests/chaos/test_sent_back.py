"""A step is trained and cannot be finished: its trajectories are lost with its controller. The learner is
sent back, starts again from its newest checkpoint, and the run is the one that nothing disturbed.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import redis

from paceline.service import process_ends
from support.training_run import (
    TRANSPORT,
    Row,
    TrainingRun,
    assert_same_metrics,
    assert_sound,
    only,
    training,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

NUM_STEPS = 14  # with a validation after the last one, as in the reference


def lose_step(run: TrainingRun, kind: str, first: int) -> int:
    """Empties Redis and kills the controller when it has recorded an event of a step that it did not finish.

    Until then it runs in slices of a few milliseconds. If a slice was long enough for the rest of the step,
    or for its checkpoint, from which it could be finished, a later step is lost. Returns which one was.

    Args:
        kind: of the event, "trained" or "commit".
        first: the first step that may be lost.
    """
    controller = psutil.Process(run.pid_of("controller"))
    controller.suspend()
    while (step := unfinished(run.events, kind)) < first:
        controller.resume()
        time.sleep(0.005)
        controller.suspend()
    run.look()
    with redis_of(run) as server:
        server.flushall()
    os.kill(controller.pid, signal.SIGKILL)
    return step


def redis_of(run: TrainingRun) -> redis.Redis:
    """A client of the run's own server."""
    lines = (run.run_dir / "redis" / "redis.conf").read_text().splitlines()
    settings = dict(line.partition(" ")[::2] for line in lines)
    return redis.Redis(port=int(settings["port"]), password=settings["requirepass"])


def unfinished(events: list[Row], kind: str) -> int:
    """The step of the last such event if it has neither been finished nor reached its checkpoint; else -1."""
    for event in reversed(events):
        if event["event"] == kind:
            return int(event.get("step", event.get("version", -1)))
        if event["event"] == "step" or event.get("to") == "checkpoint":
            break
    return -1


def newest_checkpoint(events: list[Row], event: Row) -> int:
    """The step of the last checkpoint before an event; 0, the start, if there is none."""
    return max((e["step"] for e in only(events, "checkpoint") if e["n"] < event["n"]), default=0)


def test_a_learner_that_trained_what_cannot_be_finished_is_sent_back(
    config: dict[str, object], undisturbed: list[Row], tmp_path: Path
) -> None:
    overrides = ("trainer.save_freq=3", f"trainer.total_steps={NUM_STEPS}")
    with training(config, tmp_path / "run", *overrides) as run:
        run.wait_for_phase("learn", 2)
        first = lose_step(run, "trained", 2)
        run.wait_for_phase("learn", max(5, first + 2))
        second = lose_step(run, "commit", max(5, first + 2))
        assert run.finish() == 0, run.output
        events = run.events
        assert [event["step"] for event in only(events, "lost")] == [first, second]
        to_steps = [newest_checkpoint(events, rewind) for rewind in only(events, "rewind")]
        assert [event["to_step"] for event in only(events, "rewind")] == to_steps
        assert 0 <= to_steps[0] < first
        assert 3 <= to_steps[1] < second
        commits = [event["digest"] for event in only(events, "commit") if event["version"] == second]
        assert (len(commits), len(set(commits))) == (2, 1), "the version that was void is trained again"
        assert_same_metrics(run.metrics, undisturbed[: NUM_STEPS + 1], without=TRANSPORT)
        assert_sound(run)
        ends = list(process_ends.read(run.run_dir))
        killed, sent_back = ("controller", "killed by SIGKILL"), ("learner-0", "exit code 1")
        assert [(end.name, end.outcome) for end in ends] == [killed, sent_back] * 2
        assert [end.step for end in ends if end.name == "controller"] == [first, second]
        for step in (first, second):
            assert f"step {step} is trained but not finished, and the broker has lost" in run.output, (
                run.output
            )
