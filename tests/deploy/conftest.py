"""A small run and its metrics, undisturbed on one host: what the deployed forms are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.training_run import Row, prepare_inputs, tiny_config, training

SMALL_RUN: dict[str, Any] = {"trainer": {"total_steps": 3, "save_freq": 1}}


@pytest.fixture(scope="session")
def small_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and model."""
    return prepare_inputs(tmp_path_factory.mktemp("inputs"), num_train=80, num_val=8)


@pytest.fixture(scope="session")
def small_run() -> dict[str, Any]:
    """Sections of its configuration."""
    return SMALL_RUN


@pytest.fixture(scope="session")
def undisturbed(small_inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """The metrics of `paceline train`."""
    with training(tiny_config(small_inputs, **SMALL_RUN), tmp_path_factory.mktemp("local") / "run") as run:
        assert run.finish(timeout_s=400) == 0
    return run.metrics
