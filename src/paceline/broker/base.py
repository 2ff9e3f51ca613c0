"""The interface between the services and the message broker.

A stream is a mailbox. An entry is delivered to one consumer of a group at a time and stays that consumer's
until it is acknowledged. Another consumer can reclaim an entry whose consumer has gone silent: delivery is at
least once, and readers must drop repeated messages by the messages' own ids. Blobs are plain values outside
the streams.

A stream can also be read as a log: by position, without taking entries from other readers.

A stream or group that does not exist has no entries: reading it returns [] after the wait, renewing returns
[], acknowledging does nothing. A reader whose stream is deleted gets no more entries, and no error.

Commands wait through an outage of the server, which may restart, fail over, freeze or be full. Every method
raises BrokerError when the outage outlasts a bound, or at once if waiting cannot help. An interrupted command
is repeated, so a message may be stored twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Holds a message that was delivered. `entry_id` orders the entries of a stream.

    `deliveries` counts how often the group's consumers were given the entry, this time included; entries
    that are read as a log count as delivered once.
    """

    stream: str
    entry_id: str
    payload: bytes
    traceparent: str = ""
    deliveries: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Outgoing:
    """A message to append, with blobs that must be stored before a reader can see it."""

    stream: str
    payload: bytes
    traceparent: str = ""
    blobs: Mapping[str, bytes] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ack:
    """Entries to acknowledge together with the messages that answer them."""

    stream: str
    group: str
    entry_ids: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPart:
    """Bytes to save for an unfinished entry; they replace everything from `offset` on."""

    entry_id: str
    offset: int
    data: bytes


class Broker(Protocol):
    """Streams with consumer groups, and blobs.

    Blobs may be in stores of their own, which their keys name (`names.store_of`). A store may die with its
    blobs, while the broker and its streams live on.

    Attributes:
        store: the store for new blobs of this process; "": blobs stay with the streams.
        has_stores: whether there are any.
    """

    store: str
    has_stores: bool

    async def ensure_group(self, stream: str, group: str) -> None:
        """Creates stream and group if they are missing; the group starts at the stream's first entry."""

    async def append(self, messages: Sequence[Outgoing], *, ack: Ack | None = None) -> list[str]:
        """Stores messages in order, each with its blobs before it, and acknowledges; returns entry ids.

        A message is never visible before its blobs. The acknowledgement takes effect together with the last
        message: an entry is never acknowledged without its answer.
        """

    async def read(
        self, stream: str, group: str, consumer: str, *, max_entries: int, block_s: float
    ) -> list[Entry]:
        """Takes undelivered entries; waits up to `block_s` seconds for the first; [] when none came."""

    async def reclaim(
        self, stream: str, group: str, consumer: str, *, min_idle_s: float, max_entries: int
    ) -> list[Entry]:
        """Takes over entries that no consumer has renewed for `min_idle_s` seconds.

        Entries that were removed from the stream are acknowledged and not returned.
        """

    async def renew(self, stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> list[str]:
        """Reports that the consumer still works on these entries, which resets their idle time.

        Returns the ids that are still the consumer's. Entries that another has reclaimed, or that are
        acknowledged, are not touched.
        """

    async def release(self, stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> None:
        """Gives entries back without acknowledging them: another consumer can reclaim them at once."""

    async def ack(self, stream: str, group: str, entry_ids: Sequence[str]) -> None:
        """Acknowledges entries: they are not delivered again. Unknown ids are ignored."""

    async def save_progress(
        self, stream: str, group: str, consumer: str, parts: Sequence[SavedPart]
    ) -> list[str]:
        """Saves a consumer's progress on its entries; returns the ids of those for which it was saved.

        Leaves out entries that are no longer the consumer's, and parts that would leave a gap. Acknowledging
        an entry or deleting its stream removes its saved progress. Does not wait through an outage.
        """

    async def progress(self, stream: str, group: str, entry_id: str) -> bytes:
        """Returns the saved progress of an entry that is not acknowledged; b"" if there is none."""

    async def read_log(self, stream: str, *, after: str, max_entries: int, block_s: float) -> list[Entry]:
        """Returns the entries after the id `after` ("0-0": from the first), for any number of readers.

        Waits up to `block_s` seconds for the first; [] when none came. Nothing is taken or acknowledged.
        """

    async def advance(self, stream: str, group: str, entry_id: str) -> None:
        """Records that a group that reads the stream as a log has processed everything up to `entry_id`.

        `trim` removes no entry after it. A stream or group that does not exist stays missing.
        """

    async def length(self, stream: str) -> int:
        """Returns the number of entries in the stream, read or not."""

    async def all_done(self, stream: str, group: str) -> bool:
        """Returns whether the group has taken and acknowledged every entry that the stream holds.

        A stream that does not exist holds none. A group that does not exist has taken none.
        """

    async def trim(self, stream: str) -> int:
        """Removes the entries that every group has processed, never a pending one; returns how many."""

    async def delete_streams(self, streams: Sequence[str]) -> None:
        """Removes streams with their groups."""

    async def put_blob(self, key: str, value: bytes) -> None:
        """Stores a blob without a message; replaces an earlier value."""

    async def get_blobs(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values in the order of the keys, None for a missing one."""

    async def missing_blobs(self, keys: Sequence[str]) -> list[str]:
        """Returns those of the keys that have no value, without fetching the others' values."""

    async def delete_blobs(self, keys: Sequence[str]) -> None:
        """Removes blobs; missing ones are ignored."""

    async def purge(self, prefix: str) -> int:
        """Removes every stream and blob whose name begins with `prefix`; returns how many."""

    async def store_bytes(self) -> dict[str, int | None]:
        """Returns the memory that each blob store uses, by its name; None if it does not answer."""

    async def incarnation(self) -> str:
        """Names the server's process; the name changes after a restart or a failover.

        A new process may have lost the last messages, depending on the server's configuration.
        """

    async def ping(self) -> None:
        """Raises BrokerError if the broker does not answer."""

    async def close(self) -> None:
        """Closes the connections to the server. The broker is unusable afterwards."""
