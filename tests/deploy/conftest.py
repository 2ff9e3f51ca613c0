"""What tests of several files share: the compose project with data and model, and a small run on one host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import compose_stack
from support.compose_stack import Stack
from support.training_run import Row, prepare_inputs, tiny_config, training

SMALL_RUN: dict[str, Any] = {"trainer": {"total_steps": 3, "save_freq": 1}}


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """A prepared project; at the end nothing of it is left. Skips without Docker, or without the images."""
    why = compose_stack.lacking()
    if why:
        pytest.skip(why)
    stack = Stack()
    try:
        stack.prepare()
        yield stack
    finally:
        left = stack.remove()
    assert left == []


@pytest.fixture(scope="session")
def small_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and model of the small run."""
    return prepare_inputs(tmp_path_factory.mktemp("inputs"), num_train=80, num_val=8)


@pytest.fixture(scope="session")
def small_run() -> dict[str, Any]:
    """Sections of its configuration."""
    return SMALL_RUN


@pytest.fixture(scope="session")
def undisturbed(small_inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """Its metrics under `paceline train`, with which the deployed forms are compared."""
    with training(tiny_config(small_inputs, **SMALL_RUN), tmp_path_factory.mktemp("local") / "run") as run:
        assert run.finish(timeout_s=400) == 0
    return run.metrics
