"""The repository's syntax trees are a million objects that the garbage collector need not go through."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def trees_are_not_garbage() -> Iterator[None]:
    """No collections while a file of this folder runs; what it leaves is never looked at again."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
