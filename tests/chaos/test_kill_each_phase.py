"""Each process is killed in each phase of a step; the run's metrics are those of the undisturbed run."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.kills import kill
from support.training_run import Row, differences, training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PHASES = ("dispatch", "collect", "learn", "publish", "commit", "checkpoint", "validate")
PROCESSES = ("controller", "rollout-0", "learner", "reward", "redis")
"""Of the learner rank 0 and rank 1 in turn: all ranks start again with either."""

# Between a kill and the next, so that none meets the recovery from the last.
STEPS_APART = 2


@pytest.mark.parametrize("name", PROCESSES)
def test_a_kill_in_any_phase_changes_no_metric(
    name: str, config: dict[str, object], undisturbed: list[Row], tmp_path: Path
) -> None:
    told: list[str] = []
    assert STEPS_APART * len(PHASES) + 2 == len(undisturbed) - 1
    with training(config, tmp_path / "run") as run:
        run.wait_for(lambda e: e["event"] == "step" and e["step"] == 1)
        for number, phase in enumerate(PHASES):
            step = 2 + STEPS_APART * number
            run.wait_for(
                lambda e, phase=phase, step=step: (
                    e["event"] == "phase" and e["to"] == phase and e["step"] == step
                )
            )
            began = time.monotonic()
            victim = f"learner-{number % 2}" if name == "learner" else name
            kill(run, victim)
            run.look()
            run.wait_for(lambda e, step=step: e["event"] == "step" and e["step"] > step)
            told.append(f"{phase:<11} {victim:<11} {step:>4} {time.monotonic() - began:>8.1f}")
        code = run.finish(timeout_s=600)
        by_step = differences(run.metrics, undisturbed)
        steps = sorted(by_step)
        print("phase       killed      step  seconds  equal")
        for number, line in enumerate(told):
            first, last = 2 + STEPS_APART * number, 1 + STEPS_APART * (number + 1)
            print(line, " no" if any(first <= step <= last for step in steps) else "yes")
        assert code == 0, run.output
        assert not by_step, "\n".join(f"step {step}: {'; '.join(by_step[step])}" for step in steps)
        assert [row["step"] for row in run.metrics] == [row["step"] for row in undisturbed]
        verify = [sys.executable, "-m", "paceline.controller.verify", str(run.run_dir)]
        done = subprocess.run(verify, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout
        assert run.output.count(" again (") >= len(PHASES), run.output
