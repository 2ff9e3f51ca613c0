"""A small run, and its metrics where nothing disturbs it: what runs under faults are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.shared import once
from support.training_run import (
    REWARDS,
    Row,
    assert_sound,
    prepare_inputs,
    read_jsonl,
    tiny_config,
    training,
    with_layers,
)

NUM_STEPS, TEST_FREQ = 36, 7


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs begin first, and the longest of them before all: `make test-chaos` has several processes."""
    items.sort(
        key=lambda item: (item.get_closest_marker("e2e") is None, "kill_each_phase" not in item.nodeid)
    )


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The arithmetic example's data, and one layer of its model."""

    def make(folder: Path) -> None:
        with_layers(prepare_inputs(folder, num_train=64, num_val=1), 1)

    return once(tmp_path_factory, "inputs", make)


@pytest.fixture(scope="session")
def config(inputs: Path) -> dict[str, object]:
    return tiny_config(
        inputs,
        data={"train_batch_size": 4, "max_response_length": 8},
        actor={"ppo_mini_batch_size": 2},
        rollout={"n": 2},
        reward={"functions": [{"name": f"{REWARDS}:letters"}]},
        trainer={
            "total_steps": NUM_STEPS,
            "save_freq": 1,
            "test_freq": TEST_FREQ,
            "val_before_train": False,
        },
        # Restarts are far apart: the pause before one does not grow.
        service={"max_restarts": 1000, "restart_window_s": 1},
        # It judges seconds, and a step with a kill in it takes longer.
        guard={"throughput": {"warn": None}},
    )


@pytest.fixture(scope="session")
def undisturbed(config: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    def make(folder: Path) -> None:
        with training(config, folder / "run") as run:
            assert run.finish(timeout_s=900) == 0, run.output
            assert_sound(run)

    return read_jsonl(once(tmp_path_factory, "undisturbed", make) / "run" / "metrics.jsonl")
