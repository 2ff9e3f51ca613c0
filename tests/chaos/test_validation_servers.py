"""Whole runs with a server that only validates: the same numbers, beside training, also if it is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.training_run import (
    Row,
    TrainingRun,
    assert_sound,
    only,
    prepare_inputs,
    tiny_config,
    training,
    with_layers,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

STEPS, TEST_FREQ = 9, 3


def configured(inputs: Path, **rollout: Any) -> dict[str, Any]:
    """Two prompts at a time, so that a validation takes longer than a step."""
    return tiny_config(
        inputs,
        data={"train_batch_size": 4, "max_response_length": 8},
        actor={"ppo_mini_batch_size": 2},
        rollout={"n": 2, "max_groups_in_flight": 2, "val": {"n": 2, "temperature": 1.0}, **rollout},
        learner={"world_size": 1},
        trainer={"total_steps": STEPS, "test_freq": TEST_FREQ, "save_freq": 0},
        # A server that stands still is not dead.
        service={"suspect_after_s": 100, "dead_after_s": 200},
        guard={"throughput": {"warn": None}},
    )


def validations(run: TrainingRun) -> dict[int, Row]:
    """The numbers of each step's validation, whichever line they are in."""
    by_step: dict[int, Row] = {}
    for line in run.metrics:
        if any(name.startswith("val/") for name in line):
            assert line["step"] not in by_step
            by_step[line["step"]] = {name: value for name, value in line.items() if name.startswith("val/")}
    return by_step


def trained(run: TrainingRun) -> list[Row]:
    """The rewards that were trained, step by step."""
    return [
        {name: line[name] for name in ("step", "critic/score/mean", "reward/std")}
        for line in run.metrics
        if "critic/score/mean" in line
    ]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_layers(prepare_inputs(tmp_path_factory.mktemp("inputs"), num_train=64, num_val=24), 1)


def test_a_run_with_a_validation_server_trains_meanwhile_and_one_that_is_killed_costs_nothing(
    inputs: Path, tmp_path: Path
) -> None:
    with training(configured(inputs), tmp_path / "alone", forked=True) as alone:
        assert alone.finish() == 0, alone.output
    servers = {"replicas": 2, "validation_servers": 1}
    with training(configured(inputs, **servers), tmp_path / "beside", forked=True) as run:
        run.wait_for(lambda e: e["event"] == "validate" and e["step"] == 3)
        with run.paused("rollout-1"):
            run.wait_for(lambda e: e["event"] == "step" and e["step"] == 5)
        assert run.finish() == 0, run.output
        assert_sound(run)
        order = [(e["event"], e["step"]) for e in run.events if e["event"] in ("step", "validated")]
        assert order.index(("validated", 3)) > order.index(("step", 4))
        answers = [e for e in only(run.events, "trajectory") if "beside" in e and e["beside"] < STEPS]
        assert {e["server"] for e in answers} == {"rollout-1"}
        assert {e["policy"].partition("@")[0] for e in answers if e["beside"] == 3} == {"v3"}
        assert validations(run) == validations(alone)
        assert sorted(validations(run)) == [0, 3, 6, 9]
        assert trained(run) == trained(alone)

    with training(configured(inputs, **servers), tmp_path / "killed", forked=True) as killed:
        killed.wait_for(lambda e: e["event"] == "validate" and e["step"] == 3)
        with killed.paused("rollout-1"), killed.paused_in("collect", "dispatch") as step:
            killed.kill_group("rollout-1")
        assert killed.finish() == 0, killed.output
        assert_sound(killed)
        skipped = [e["step"] for e in only(killed.events, "validation_skipped")]
        # In step 4 the other server still has the weights of step 3.
        assert skipped == ([] if step == 4 else [3])
        expected = {number: of for number, of in validations(alone).items() if number not in skipped}
        assert validations(killed) == expected
        assert trained(killed) == trained(alone)
