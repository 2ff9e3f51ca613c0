"""One thread: the tensors here are tiny, and results must not depend on how a sum was split over cores.

Imports of what needs a process group wait until a test asks for it: most tests here are of pure functions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from paceline.learner.distributed.ranks import Ranks


def pytest_configure(config: pytest.Config) -> None:
    """In every process that runs tests; one that only hands them out needs no torch."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        import torch

        torch.set_num_threads(1)
        # pytest listens to loggers that do not propagate; for a listener torch writes out what it compiles.
        logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """This process as a group of one rank."""
    from support.learner_ranks import alone

    with alone() as group:
        yield group


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model: of one layer, or of the file's NUM_LAYERS if layers matter to it."""
    from support.learner_fakes import write_model

    num_layers = getattr(request.module, "NUM_LAYERS", 1)
    return write_model(tmp_path_factory.mktemp("model"), num_layers=num_layers)
