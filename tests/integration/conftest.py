"""What the whole runs of this room share."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.shared import once
from support.training_run import prepare_inputs, with_layers


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The arithmetic example's data, for five steps of 16 prompts, and two layers of its model."""

    def prepare(folder: Path) -> object:
        return with_layers(prepare_inputs(folder, num_train=80, num_val=8), 2)

    return once(tmp_path_factory, "inputs", prepare)
