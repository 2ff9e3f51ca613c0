"""Helpers for tests that talk to a broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from paceline.broker import Broker, Entry, Outgoing


def messages(stream: str, payloads: Iterable[str]) -> list[Outgoing]:
    """One message per payload, without blobs."""
    return [Outgoing(stream=stream, payload=payload.encode()) for payload in payloads]


def payloads(entries: Iterable[Entry]) -> list[str]:
    """What entries say, in their order."""
    return [entry.payload.decode() for entry in entries]


async def drain(broker: Broker, stream: str, group: str, consumer: str) -> list[Entry]:
    """Everything undelivered, without waiting."""
    entries: list[Entry] = []
    while fresh := await broker.read(stream, group, consumer, max_entries=100, block_s=0):
        entries += fresh
    return entries


async def reclaim_all(broker: Broker, stream: str, group: str, consumer: str) -> list[Entry]:
    """Everything pending, whoever holds it and however fresh its lease is."""
    return await broker.reclaim(stream, group, consumer, min_idle_s=0, max_entries=10_000)


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """So far."""
        return time.monotonic() - self._started


async def soon(seconds: float, broker: Broker, batch: list[Outgoing]) -> None:
    """Appends a little later."""
    await asyncio.sleep(seconds)
    await broker.append(batch)
