"""A page of memory that a child process shares with its parent: which item it started last, and when."""

from __future__ import annotations

import mmap
import struct


class ItemProgress:
    """Tells the parent which item a child hung or died on, without a message per item.

    Times are CLOCK_MONOTONIC in seconds, which all processes of a machine share.
    """

    SIZE_BYTES = mmap.PAGESIZE
    _LAYOUT = struct.Struct("<qd")

    def __init__(self, file_descriptor: int) -> None:
        self._page = mmap.mmap(file_descriptor, self.SIZE_BYTES)

    def note(self, number: int, started: float) -> None:
        """Notes the item that begins now; the child calls this before each item."""
        self._LAYOUT.pack_into(self._page, 0, number, started)

    def read(self) -> tuple[int, float]:
        """Returns the number of the last item begun, 0 before the first, and its start."""
        number, started = self._LAYOUT.unpack_from(self._page)
        return int(number), float(started)

    def close(self) -> None:
        """Unmaps the page that parent and child share."""
        self._page.close()
