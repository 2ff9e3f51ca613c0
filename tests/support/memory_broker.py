"""A broker on dictionaries inside one process; the contract tests of brokers run against it, too."""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.broker.base import Ack, Entry, Outgoing, SavedPart
from paceline.core.clock import Clock, SystemClock
from paceline.core.errors import BrokerError


@dataclass(slots=True)
class _Pending:
    """A delivery that is not acknowledged."""

    consumer: str
    last_sign_s: float
    deliveries: int = 1
    progress: bytes = b""


@dataclass(slots=True)
class _Group:
    last_delivered: int = 0
    pending: dict[int, _Pending] = field(default_factory=dict)


@dataclass(slots=True)
class _Stream:
    """Entries by number; numbers count from 1 and are never reused."""

    entries: dict[int, Outgoing] = field(default_factory=dict)
    groups: dict[str, _Group] = field(default_factory=dict)


class MemoryStore:
    """The streams and blobs of a server; `MemoryBroker`s of one process and event loop may share it."""

    def __init__(self) -> None:
        self.streams: dict[str, _Stream] = {}
        self.blobs: dict[str, bytes] = {}
        self.last_number = 0
        self.changed = asyncio.Condition()


class MemoryBroker:
    """Implements `Broker` on dictionaries, within one process.

    Args:
        clock: measures how long an entry has been idle; waiting always uses real time.
        store: the streams and blobs; None creates a new store.
    """

    def __init__(self, clock: Clock | None = None, *, store: MemoryStore | None = None) -> None:
        self._clock = clock or SystemClock()
        self._store = store or MemoryStore()
        self._closed = False
        self.store, self.has_stores = "", False

    def _group(self, stream: str, group: str) -> _Group | None:
        self._check_open()
        state = self._store.streams.get(stream)
        return state.groups.get(group) if state else None

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerError("broker memory:// is closed: open another")

    async def ensure_group(self, stream: str, group: str) -> None:
        """Creates stream and group if they are missing; the group starts at the stream's first entry."""
        self._check_open()
        self._store.streams.setdefault(stream, _Stream()).groups.setdefault(group, _Group())

    async def append(self, messages: Sequence[Outgoing], *, ack: Ack | None = None) -> list[str]:
        """Stores messages in order, each with its blobs before it, and acknowledges; returns entry ids."""
        self._check_open()
        ids = []
        for message in messages:
            self._store.blobs.update(message.blobs or {})
            self._store.last_number += 1
            stream = self._store.streams.setdefault(message.stream, _Stream())
            stream.entries[self._store.last_number] = message
            ids.append(_entry_id(self._store.last_number))
        if ack is not None:
            self._ack(ack)
        async with self._store.changed:
            self._store.changed.notify_all()
        return ids

    async def read(
        self, stream: str, group: str, consumer: str, *, max_entries: int, block_s: float
    ) -> list[Entry]:
        """Takes undelivered entries; waits up to `block_s` seconds for the first; [] when none came."""
        return await self._wait_for(lambda: self._deliver(stream, group, consumer, max_entries), block_s)

    async def read_log(self, stream: str, *, after: str, max_entries: int, block_s: float) -> list[Entry]:
        """Returns entries after `after`; waits up to `block_s` seconds for the first; [] when none came."""
        return await self._wait_for(lambda: self._after(stream, after, max_entries), block_s)

    async def _wait_for(self, look: Callable[[], list[Entry]], block_s: float) -> list[Entry]:
        entries = look()
        if entries or block_s <= 0:
            return entries
        try:
            async with asyncio.timeout(block_s), self._store.changed:
                while not (entries := look()):
                    await self._store.changed.wait()
        except TimeoutError:
            return []
        return entries

    def _after(self, stream: str, entry_id: str, max_entries: int) -> list[Entry]:
        self._check_open()
        state = self._store.streams.get(stream)
        messages = state.entries if state else {}
        numbers = list(messages)
        following = numbers[bisect.bisect_right(numbers, _number(entry_id)) :][:max_entries]
        return [_entry(messages[number], number) for number in following]

    def _deliver(self, stream: str, group: str, consumer: str, max_entries: int) -> list[Entry]:
        state = self._group(stream, group)
        if state is None:
            return []
        messages = self._store.streams[stream].entries
        numbers = list(messages)
        fresh = numbers[bisect.bisect_right(numbers, state.last_delivered) :][:max_entries]
        for number in fresh:
            state.pending[number] = _Pending(consumer, self._clock.monotonic())
            state.last_delivered = number
        return [_entry(messages[number], number) for number in fresh]

    async def reclaim(
        self, stream: str, group: str, consumer: str, *, min_idle_s: float, max_entries: int
    ) -> list[Entry]:
        """Takes over entries that no consumer has renewed for `min_idle_s` seconds."""
        state = self._group(stream, group)
        if state is None:
            return []
        now, messages = self._clock.monotonic(), self._store.streams[stream].entries
        entries: list[Entry] = []
        for number in sorted(state.pending):
            pending = state.pending[number]
            if len(entries) < max_entries and now - pending.last_sign_s >= min_idle_s:
                pending.consumer, pending.last_sign_s = consumer, now
                pending.deliveries += 1
                entries.append(_entry(messages[number], number, pending.deliveries))
        return entries

    async def renew(self, stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> list[str]:
        """Resets the entries' idle time; returns those that are still the consumer's."""
        return self._touch(stream, group, consumer, entry_ids, self._clock.monotonic())

    async def release(self, stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> None:
        """Gives entries back without acknowledging them: another consumer can reclaim them at once."""
        self._touch(stream, group, consumer, entry_ids, float("-inf"))

    def _touch(
        self, stream: str, group: str, consumer: str, entry_ids: Sequence[str], last_sign_s: float
    ) -> list[str]:
        state = self._group(stream, group)
        if state is None:
            return []
        own = [
            entry_id
            for entry_id in entry_ids
            if (pending := state.pending.get(_number(entry_id))) and pending.consumer == consumer
        ]
        for entry_id in own:
            state.pending[_number(entry_id)].last_sign_s = last_sign_s
        return own

    async def ack(self, stream: str, group: str, entry_ids: Sequence[str]) -> None:
        """Acknowledges entries: they are not delivered again. Unknown ids are ignored."""
        self._ack(Ack(stream=stream, group=group, entry_ids=entry_ids))

    async def save_progress(
        self, stream: str, group: str, consumer: str, parts: Sequence[SavedPart]
    ) -> list[str]:
        """Saves a consumer's progress on its entries; returns the ids of those for which it was saved."""
        state, saved = self._group(stream, group) or _Group(), []
        for part in parts:
            pending = state.pending.get(_number(part.entry_id))
            if pending and pending.consumer == consumer and part.offset <= len(pending.progress):
                pending.progress = pending.progress[: part.offset] + part.data
                saved.append(part.entry_id)
        return saved

    async def progress(self, stream: str, group: str, entry_id: str) -> bytes:
        """Returns the saved progress of an entry that is not acknowledged; b"" if there is none."""
        state = self._group(stream, group) or _Group()
        pending = state.pending.get(_number(entry_id))
        return pending.progress if pending is not None else b""

    def _ack(self, ack: Ack) -> None:
        state = self._group(ack.stream, ack.group)
        if state is not None:
            for entry_id in ack.entry_ids:
                state.pending.pop(_number(entry_id), None)

    async def advance(self, stream: str, group: str, entry_id: str) -> None:
        """Records that a group that reads the stream as a log has processed everything up to `entry_id`."""
        state = self._group(stream, group)
        if state is not None:
            state.last_delivered = _number(entry_id)

    async def length(self, stream: str) -> int:
        """Returns the number of entries in the stream, read or not."""
        self._check_open()
        state = self._store.streams.get(stream)
        return len(state.entries) if state else 0

    async def all_done(self, stream: str, group: str) -> bool:
        """Returns whether the group has taken and acknowledged every entry that the stream holds."""
        self._check_open()
        state = self._store.streams.get(stream, _Stream())
        reader = state.groups.get(group, _Group())
        return not reader.pending and max(state.entries, default=0) <= reader.last_delivered

    async def trim(self, stream: str) -> int:
        """Removes the entries that every group has processed, never a pending one; returns how many."""
        self._check_open()
        state = self._store.streams.get(stream)
        if state is None or not state.groups:
            return 0
        floor = min(min(group.pending, default=group.last_delivered + 1) for group in state.groups.values())
        done = [number for number in state.entries if number < floor]
        for number in done:
            del state.entries[number]
        return len(done)

    async def delete_streams(self, streams: Sequence[str]) -> None:
        """Removes streams with their groups."""
        self._check_open()
        for stream in streams:
            self._store.streams.pop(stream, None)

    async def put_blob(self, key: str, value: bytes) -> None:
        """Stores a blob without a message; replaces an earlier value."""
        self._check_open()
        self._store.blobs[key] = value

    async def get_blobs(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values in the order of the keys, None for a missing one."""
        self._check_open()
        return [self._store.blobs.get(key) for key in keys]

    async def missing_blobs(self, keys: Sequence[str]) -> list[str]:
        """Returns those of the keys that have no value."""
        self._check_open()
        return [key for key in keys if key not in self._store.blobs]

    async def delete_blobs(self, keys: Sequence[str]) -> None:
        """Removes blobs; missing ones are ignored."""
        self._check_open()
        for key in keys:
            self._store.blobs.pop(key, None)

    async def purge(self, prefix: str) -> int:
        """Removes every stream and blob whose name begins with `prefix`; returns how many.

        Raises:
            ValueError: the prefix is empty, which would empty the store.
        """
        self._check_open()
        if not prefix:
            raise ValueError("purge needs a prefix: an empty one would empty the whole server")
        streams = [name for name in self._store.streams if name.startswith(prefix)]
        blobs = [name for name in self._store.blobs if name.startswith(prefix)]
        await self.delete_streams(streams)
        await self.delete_blobs(blobs)
        return len(streams) + len(blobs)

    async def store_bytes(self) -> dict[str, int | None]:
        """Returns nothing: there are no stores that use memory of their own."""
        return {}

    async def incarnation(self) -> str:
        """Returns the name of this store."""
        self._check_open()
        return f"memory-{id(self._store):x}"

    async def ping(self) -> None:
        """Raises BrokerError if the broker is closed."""
        self._check_open()

    async def close(self) -> None:
        """Closes this broker; a shared store stays usable."""
        self._closed = True


def _entry_id(number: int) -> str:
    return f"{number}-0"


def _number(entry_id: str) -> int:
    return int(entry_id.partition("-")[0])


def _entry(message: Outgoing, number: int, deliveries: int = 1) -> Entry:
    return Entry(
        stream=message.stream,
        entry_id=_entry_id(number),
        payload=message.payload,
        traceparent=message.traceparent,
        deliveries=deliveries,
    )
