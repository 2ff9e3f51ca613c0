"""The repository's syntax trees are a million objects that the garbage collector need not go through."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from support import source


@pytest.fixture(scope="package", autouse=True)
def trees_are_not_garbage() -> Iterator[None]:
    """No collections while this folder's tests run; the trees go with them."""
    gc.disable()
    yield
    source.tree.cache_clear()
    gc.enable()
