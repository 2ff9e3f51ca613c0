"""Ends the process of a reward model that hangs, so that whoever started the process restarts it.

A call on a GPU, or in a library, may hang without letting another Python thread run, so `faulthandler` ends
the process from a C thread. It also logs where the process hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from paceline.core.scoring import ScoreItem

ValueT = TypeVar("ValueT")

_STDERR = 2


@contextlib.contextmanager
def or_end(timeout_s: float) -> Iterator[None]:
    """Ends the process with exit code 1 if the block takes longer. Blocks must not overlap."""
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=_STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class Bounded(Generic[ValueT]):
    """A batch function with a deadline for each call; one call at a time."""

    def __init__(self, model: Callable[[list[ScoreItem]], list[ValueT]], timeout_s: float) -> None:
        self._model, self._timeout_s = model, timeout_s

    def __call__(self, items: list[ScoreItem]) -> list[ValueT]:
        """Calls the function; ends the process with exit code 1 if it takes longer."""
        with or_end(self._timeout_s):
            return self._model(items)
