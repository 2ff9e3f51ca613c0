"""Imports of large packages, without the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Within the block nothing is collected, and what exists at its end is never looked at again.

    An import creates objects that stay. With each tenth of a million of them the collector visits all: a
    fifth of the time that an import of torch, transformers or an engine takes.
    """
    if not gc.isenabled():  # another block around this one, or beside it in another thread
        yield
        return
    num_modules = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        gc.enable()
