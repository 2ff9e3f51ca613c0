"""The seam between the services and the message broker.

A stream is a mailbox. An entry is delivered to one consumer of a group at a time and stays that consumer's
until it is acknowledged. Another consumer can reclaim an entry whose consumer has gone silent: delivery is at
least once, and readers must drop repeats by the message's own id. Blobs are plain values beside the streams.

A stream or group that does not exist has no entries: reading it returns [] after the wait, renewing returns
[], acknowledging does nothing. A reader whose stream is deleted gets no more entries, and no error.

Every method may raise BrokerError (the broker refused or is gone) and DeadlineError (no answer in time).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A delivered message. `entry_id` orders the entries of a stream."""

    stream: str
    entry_id: str
    payload: bytes
    traceparent: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outgoing:
    """A message to append, with blobs that must be stored before a reader can see it."""

    stream: str
    payload: bytes
    traceparent: str = ""
    blobs: Mapping[str, bytes] | None = None


class Broker(Protocol):
    """Streams with consumer groups, and blobs."""

    async def ensure_group(self, stream: str, group: str) -> None:
        """Creates stream and group where they are missing; the group starts at the stream's first entry."""
        ...

    async def append(self, messages: Sequence[Outgoing]) -> list[str]:
        """Stores messages in order, each with its blobs before it; returns entry ids.

        A message is never visible before its blobs. A command repeated after a lost connection may store a
        message twice: readers drop repeats by the message's own id.
        """
        ...

    async def read(
        self, stream: str, group: str, consumer: str, *, max_entries: int, block_s: float
    ) -> list[Entry]:
        """Takes undelivered entries; waits up to `block_s` seconds for the first; [] when none came."""
        ...

    async def reclaim(
        self, stream: str, group: str, consumer: str, *, min_idle_s: float, max_entries: int
    ) -> list[Entry]:
        """Takes over entries that no consumer has renewed for `min_idle_s` seconds."""
        ...

    async def renew(self, stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> list[str]:
        """Reports that the consumer still works on these entries, which resets their idle time.

        Returns the ids that are still the consumer's. Entries that another has reclaimed, or that are
        acknowledged, are not touched.
        """
        ...

    async def release(self, stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> None:
        """Gives entries back without acknowledging them: another consumer can reclaim them at once."""
        ...

    async def ack(self, stream: str, group: str, entry_ids: Sequence[str]) -> None:
        """Acknowledges entries: they are not delivered again. Unknown ids are ignored."""
        ...

    async def length(self, stream: str) -> int:
        """Number of entries in the stream, read or not."""
        ...

    async def trim(self, stream: str) -> int:
        """Removes entries that every group has acknowledged; never a pending one. Returns how many."""
        ...

    async def delete_streams(self, streams: Sequence[str]) -> None:
        """Removes streams with their groups."""
        ...

    async def get_blobs(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values in the order of the keys, None for a missing one."""
        ...

    async def delete_blobs(self, keys: Sequence[str]) -> None:
        """Removes blobs; missing ones are ignored."""
        ...

    async def purge(self, prefix: str) -> int:
        """Removes every stream and blob whose name begins with `prefix`; returns how many."""
        ...

    async def ping(self) -> None:
        """Raises BrokerError where the broker does not answer."""
        ...

    async def close(self) -> None:
        """Closes the connections. The broker is unusable afterwards."""
        ...
