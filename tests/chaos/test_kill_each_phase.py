"""Each process is killed in each phase of a step; the run's metrics are those of the undisturbed run."""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path

import pytest

from support.kills import kill
from support.training_run import Row, assert_sound, differences, training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

PROCESSES = ("controller", "rollout-0", "learner", "reward", "redis")
"""Of the learner rank 0 and rank 1 in turn: all ranks start again with either."""
PHASES = ("dispatch", "collect", "learn", "publish", "commit", "checkpoint")
VALIDATE = "validate"


def kills(validated: list[int], num_steps: int) -> dict[int, tuple[str, str]]:
    """Which phase and which process, by step: one kill in each but the last, which nothing disturbs.

    A process that is killed is needed again within the step, or in the next one before the phase in which
    another is killed: no kill meets the recovery from the last.
    """
    others = iter(product(PHASES, PROCESSES))
    in_validation = iter(product([VALIDATE], PROCESSES))
    return {step: next(in_validation if step in validated else others) for step in range(1, num_steps)}


def test_a_kill_in_any_phase_changes_no_metric(
    config: dict[str, object], undisturbed: list[Row], tmp_path: Path
) -> None:
    validated = [int(row["step"]) for row in undisturbed[:-1] if "val/reward/mean" in row]
    planned = kills(validated, num_steps=len(undisturbed) - 1)
    assert set(planned.values()) == set(product([*PHASES, VALIDATE], PROCESSES))
    told: dict[int, str] = {}
    with training(config, tmp_path / "run") as run:
        for step, (phase, name) in planned.items():
            run.wait_for_phase(phase, step)
            began = time.monotonic()
            victim = f"learner-{step % 2}" if name == "learner" else name
            kill(run, victim)
            run.look()
            run.wait_for(lambda e, step=step: e["event"] == "step" and e["step"] == step)
            told[step] = f"{phase:<11} {victim:<11} {step:>4} {time.monotonic() - began:>8.1f}"
        code = run.finish(timeout_s=600)
        by_step = differences(run.metrics, undisturbed)
        print("phase       killed      step  seconds  equal")
        for step, line in told.items():
            print(line, " no" if step in by_step else "yes")
        assert code == 0, run.output
        assert not by_step, "\n".join(f"step {step}: {'; '.join(by_step[step])}" for step in sorted(by_step))
        assert [row["step"] for row in run.metrics] == [row["step"] for row in undisturbed]
        assert_sound(run)
        assert run.output.count(" again (") >= len(planned), run.output
