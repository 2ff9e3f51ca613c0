"""What tests of several files share: the compose project with data and model, and a small run on one host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import compose_stack
from support.compose_stack import Stack
from support.small_run import SECTIONS, LocalRun, train_locally
from support.training_run import Row, prepare_inputs


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
    return SECTIONS


@pytest.fixture(scope="session")
def local_run(small_inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    """The small run under `paceline train`."""
    return train_locally(small_inputs, tmp_path_factory.mktemp("local") / "run")


@pytest.fixture(scope="session")
def undisturbed(local_run: LocalRun) -> list[Row]:
    """Its metrics, with which the deployed forms are compared."""
    return local_run.metrics
