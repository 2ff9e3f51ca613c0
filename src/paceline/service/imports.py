"""Imports and plans of many objects that stay, without the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Disables the garbage collector within the block, or a decorated function.

    After imports, the objects that exist at the block's end are never examined again. An import, or a plan of
    pushes or of a large step, creates objects that stay. The collector would visit all of them for every
    100,000 new ones, which takes a fifth of the time of importing torch, transformers or an engine, and a
    third of the time of a plan.
    """
    if not gc.isenabled():  # another such block is active, maybe in another thread
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
