"""A small run, and its metrics where nothing disturbs it: what runs under faults are compared with."""

from __future__ import annotations

import pytest

from support.training_run import REWARDS, Row, prepare_inputs, tiny_config, training

NUM_STEPS, VALIDATED = 16, 14


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    inputs = prepare_inputs(tmp_path_factory.mktemp("inputs"), num_train=64, num_val=1)
    return tiny_config(
        inputs,
        data={"train_batch_size": 4, "max_response_length": 8},
        actor={"ppo_mini_batch_size": 2},
        rollout={"n": 2},
        reward={"functions": [{"name": f"{REWARDS}:letters"}]},
        trainer={
            "total_steps": NUM_STEPS,
            "save_freq": 1,
            "test_freq": VALIDATED,
            "val_before_train": False,
        },
        service={"max_restarts": 1000, "recovery_timeout_s": 200},
        # It judges seconds, and a step with a kill in it takes longer.
        guard={"throughput": {"warn": None}},
    )


@pytest.fixture(scope="session")
def undisturbed(config: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    with training(config, tmp_path_factory.mktemp("undisturbed") / "run") as run:
        assert run.finish(timeout_s=600) == 0, run.output
        return run.metrics
