"""Reads a stream as a log from beginning to end."""

from __future__ import annotations

from collections.abc import AsyncIterator

from paceline.broker.base import Broker, Entry

LOG_START = "0-0"
"""The position before the first entry of every stream."""

_PORTION = 512


def is_after(entry_id: str, other: str) -> bool:
    """Returns whether an entry comes after another of its stream, or after the position LOG_START."""
    return _parts(entry_id) > _parts(other)


async def read_all(broker: Broker, stream: str) -> AsyncIterator[Entry]:
    """Yields every entry that the stream holds now, without waiting for more."""
    position = LOG_START
    while entries := await broker.read_log(stream, after=position, max_entries=_PORTION, block_s=0.0):
        for entry in entries:
            yield entry
        position = entries[-1].entry_id


def _parts(entry_id: str) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number or 0)
