"""Standard output and standard error whose lines arrive whole."""

from __future__ import annotations

import io
import sys


def write_whole_lines() -> None:
    """Puts a buffer under a stream that has none, as with PYTHONUNBUFFERED; lines are still written at once.

    Only this process's own streams are changed, not what something else has put in their place.
    Without a buffer, Python drops the rest of a line if a signal interrupts its write to a full pipe, so the
    reader of `paceline train --json` would get half of an event.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        is_own = stream is getattr(sys, f"__{name}__")
        if is_own and isinstance(getattr(stream, "buffer", None), io.RawIOBase):
            # A file of its own: `stream` stays open, whatever becomes of this one.
            raw = io.FileIO(stream.fileno(), "w", closefd=False)
            buffer = io.BufferedWriter(raw)
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True))
