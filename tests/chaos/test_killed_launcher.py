"""The launcher is killed: no process of the run is left, and the same command goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.training_run import Row, assert_same_metrics, assert_sound, only, training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

NUM_STEPS = 7  # with a validation after the last one, as in the reference


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_all_processes_end_if_the_launcher_is_killed_during_the_start(
    config: dict[str, object], tmp_path: Path, number: signal.Signals
) -> None:
    """The engine and the ranks are still starting; if the launcher is killed, all must end by themselves."""
    with training(config, tmp_path / "run") as run:
        for name in ("reward-0", "learner-0", "rollout-0"):
            run.wait_for_member(name)
        run.look()
        os.kill(run.pid_of("launcher"), number)
        code = run.process.wait(300)
        run.wait_until_nothing_is_left(timeout_s=300)
        assert code == (143 if number == signal.SIGTERM else -number)


def test_the_same_command_goes_on_after_the_launcher_was_killed(
    config: dict[str, object], undisturbed: list[Row], tmp_path: Path
) -> None:
    total_steps = f"trainer.total_steps={NUM_STEPS}"
    with training(config, tmp_path / "run", total_steps) as run:
        run.wait_for_phase("learn", 4)
        # While it stands still: else a slow test would kill it when all steps are done.
        with run.paused_in("collect", "learn", "publish"):
            run.look()
            run.process.kill()
        run.process.wait(300)
        run.wait_until_nothing_is_left(timeout_s=300)
    with training(config, tmp_path / "run", total_steps) as run:
        assert run.finish() == 0, run.output
        first, second = only(run.events, "run")
        assert (first["step"], first["term"], second["term"]) == (0, 1, 2)
        finished = [event["step"] for event in only(run.events, "step") if event["n"] < second["n"]]
        assert 3 <= second["step"] == finished[-1] < NUM_STEPS
        assert_sound(run)
        assert_same_metrics(
            run.metrics, undisturbed[: NUM_STEPS + 1], without=("barrier/duplicates", "barrier/rejected")
        )
