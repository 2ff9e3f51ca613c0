"""What tests of several files share: the compose project with data and starting model, made once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import compose_stack
from support.compose_stack import Stack


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
