"""What pytest's processes share: a folder that the first of them fills which needs it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder of this session of pytest that `make` has filled; the others wait until it is full.

    If `make` fails, the next one that asks begins again in a new folder.
    """
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    done = root / f"{name}.done"
    with FileLock(root / f"{name}.lock"):
        if not done.exists():
            folder = factory.mktemp(name)
            make(folder)
            done.write_text(str(folder))
    return Path(done.read_text())
