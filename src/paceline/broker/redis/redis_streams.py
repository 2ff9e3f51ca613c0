"""The broker over Redis Streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from paceline.broker.base import Ack, Entry, Outgoing, SavedPart
from paceline.broker.redis import lua_scripts
from paceline.broker.redis.redis_client import GroupExistsError, RedisClient, StreamMissingError
from paceline.core.errors import BrokerError

log = logging.getLogger(__name__)

RELEASED_IDLE_MS: Final = 24 * 3600 * 1000
"""Idle time of a released entry: more than any lease."""

_ITEMS_PER_COMMAND: Final = 256
_BYTES_PER_COMMAND: Final = 8 * 2**20
_KEYS_PER_FETCH: Final = 64
_KEYS_PER_DELETE: Final = 1000
_OLDEST_SERVER: Final = (6, 2)
_FIRST_CONTACT_S: Final = 15.0
_Item = TypeVar("_Item")


class RedisStreamsBroker:
    """Implements `Broker` on one Redis or Valkey server, 6.2 or later."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self.store, self.has_stores = "", False

    async def ensure_group(self, stream: str, group: str) -> None:
        """Creates stream and group if they are missing; the group starts at the stream's first entry."""
        try:
            await self._client.run("XGROUP CREATE", stream, group, "0", "MKSTREAM")
        except GroupExistsError:
            return

    async def append(self, messages: Sequence[Outgoing], *, ack: Ack | None = None) -> list[str]:
        """Stores messages in order, each with its blobs before it, and acknowledges; returns entry ids."""
        ids: list[str] = []
        batches = list(_batches(messages, _size))
        for batch in batches[:-1]:
            ids += await self._append_batch(batch, None)
        if batches or ack is not None:
            ids += await self._append_batch(batches[-1] if batches else [], ack)
        return ids

    async def _append_batch(self, messages: Sequence[Outgoing], ack: Ack | None) -> list[str]:
        blobs = [item for message in messages for item in (message.blobs or {}).items()]
        keys = [message.stream for message in messages]
        arguments: list[Any] = [len(messages)]
        for message in messages:
            arguments += (message.payload, message.traceparent)
        if ack is not None:
            keys.append(ack.stream)
            arguments += (ack.group, *ack.entry_ids)
        entry_ids = await self._client.run_script(
            lua_scripts.APPEND, keys, arguments, before=[("SET", key, value) for key, value in blobs]
        )
        return [entry_id.decode() for entry_id in entry_ids]

    async def read(
        self, stream: str, group: str, consumer: str, *, max_entries: int, block_s: float
    ) -> list[Entry]:
        """Takes undelivered entries; waits up to `block_s` seconds for the first; [] when none came."""
        started = time.monotonic()
        command = ("XREADGROUP", "GROUP", group, consumer, "COUNT", max_entries)
        try:
            return await self._read(command, stream, ">", block_s)
        except StreamMissingError as error:
            log.warning("nothing to read: %s", error)
            await asyncio.sleep(max(0.0, block_s - (time.monotonic() - started)))
            return []

    async def read_log(self, stream: str, *, after: str, max_entries: int, block_s: float) -> list[Entry]:
        """Returns entries after `after`; waits up to `block_s` seconds for the first; [] when none came."""
        return await self._read(("XREAD", "COUNT", max_entries), stream, after, block_s)

    async def _read(self, command: Sequence[Any], stream: str, after: str, block_s: float) -> list[Entry]:
        if block_s > 0:
            block_ms = max(1, round(block_s * 1000))  # BLOCK 0 would wait forever
            words = (*command, "BLOCK", block_ms, "STREAMS", stream, after)
            reply = await self._client.run_blocking(*words, block_s=block_s)
        else:
            reply = await self._client.run(*command, "STREAMS", stream, after)
        return [_entry(stream, row) for row in reply[0][1]] if reply else []

    async def reclaim(
        self, stream: str, group: str, consumer: str, *, min_idle_s: float, max_entries: int
    ) -> list[Entry]:
        """Takes over entries that no consumer has renewed for `min_idle_s` seconds.

        Takes over nothing soon after an outage, because living consumers could not renew their leases during
        it.
        """
        if not self._client.outage.is_recent(min_idle_s):
            arguments = [group, consumer, round(min_idle_s * 1000), max_entries]
            try:
                rows = await self._client.run_script(lua_scripts.RECLAIM, [stream], arguments, limit_s=0.0)
                return [_entry(stream, row[:2], deliveries=row[2]) for row in rows]
            except StreamMissingError:
                return []
            except BrokerError:
                if not self._client.outage.is_on:
                    raise
        if self._client.outage.is_on:
            await self._client.run("PING")
        return []

    async def renew(self, stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> list[str]:
        """Resets the entries' idle time; returns those that are still the consumer's."""
        return await self._touch(stream, group, consumer, entry_ids, idle_ms=0)

    async def release(self, stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> None:
        """Gives entries back without acknowledging them: another consumer can reclaim them at once."""
        await self._touch(stream, group, consumer, entry_ids, idle_ms=RELEASED_IDLE_MS)

    async def _touch(
        self, stream: str, group: str, consumer: str, entry_ids: Sequence[str], *, idle_ms: int
    ) -> list[str]:
        if not entry_ids:
            return []
        try:
            own_ids = await self._client.run_script(
                lua_scripts.TOUCH, [stream], [group, consumer, idle_ms, *entry_ids]
            )
        except StreamMissingError:
            return []
        return [entry_id.decode() for entry_id in own_ids]

    async def ack(self, stream: str, group: str, entry_ids: Sequence[str]) -> None:
        """Acknowledges entries: they are not delivered again. Unknown ids are ignored."""
        if entry_ids:
            await self._append_batch([], Ack(stream=stream, group=group, entry_ids=entry_ids))

    async def save_progress(
        self, stream: str, group: str, consumer: str, parts: Sequence[SavedPart]
    ) -> list[str]:
        """Saves a consumer's progress on its entries; returns the ids of those for which it was saved."""
        saved: list[str] = []
        for batch in _batches(parts, lambda part: len(part.data)):
            words = [word for part in batch for word in (part.entry_id, part.offset, part.data)]
            try:
                ids = await self._client.run_script(
                    lua_scripts.SAVE_PROGRESS, [stream], [group, consumer, *words], limit_s=0.0
                )
            except StreamMissingError:
                break
            saved += [entry_id.decode() for entry_id in ids]
        return saved

    async def progress(self, stream: str, group: str, entry_id: str) -> bytes:
        """Returns the saved progress of an entry that is not acknowledged; b"" if there is none."""
        (saved,) = await self.get_blobs([f"{stream}:{group}:{entry_id}"])
        return saved or b""

    async def advance(self, stream: str, group: str, entry_id: str) -> None:
        """Records that a group that reads the stream as a log has processed everything up to `entry_id`."""
        with contextlib.suppress(StreamMissingError):
            await self._client.run("XGROUP SETID", stream, group, entry_id)

    async def length(self, stream: str) -> int:
        """Returns the number of entries in the stream, read or not."""
        return int(await self._client.run("XLEN", stream))

    async def all_done(self, stream: str, group: str) -> bool:
        """Returns whether the group has taken and acknowledged every entry that the stream holds."""
        try:
            return bool(await self._client.run_script(lua_scripts.ALL_DONE, [stream], [group]))
        except StreamMissingError:
            return True

    async def trim(self, stream: str) -> int:
        """Removes the entries that every group has processed, never a pending one; returns how many.

        A stream without groups keeps everything: it has no reader yet.
        """
        try:
            return int(await self._client.run_script(lua_scripts.TRIM, [stream], []))
        except StreamMissingError:
            return 0

    async def delete_streams(self, streams: Sequence[str]) -> None:
        """Removes streams with their groups."""
        for chunk in _chunks(streams, _KEYS_PER_DELETE):
            await self._client.run_script(lua_scripts.DELETE_STREAMS, chunk, [])

    async def put_blob(self, key: str, value: bytes) -> None:
        """Stores a blob without a message; replaces an earlier value."""
        await self._client.run("SET", key, value)

    async def put_blobs(self, blobs: Mapping[str, bytes]) -> None:
        """Stores blobs without messages; replaces earlier values."""
        for batch in _batches(blobs.items(), lambda item: len(item[1])):
            await self._client.run_all([("SET", key, value) for key, value in batch])

    async def get_blobs(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values in the order of the keys, None for a missing one."""
        values: list[bytes | None] = []
        for chunk in _chunks(keys, _KEYS_PER_FETCH):
            values += await self._client.run("MGET", *chunk)
        return values

    async def missing_blobs(self, keys: Sequence[str]) -> list[str]:
        """Returns those of the keys that have no value, without fetching the others' values."""
        present = [
            bool(is_there)
            for chunk in _chunks(keys, _KEYS_PER_DELETE)
            for is_there in await self._client.run_all([("EXISTS", key) for key in chunk])
        ]
        return [key for key, is_there in zip(keys, present, strict=True) if not is_there]

    async def delete_blobs(self, keys: Sequence[str]) -> None:
        """Removes blobs; missing ones are ignored."""
        await self._unlink(keys)

    async def _unlink(self, keys: Sequence[str | bytes]) -> None:
        for chunk in _chunks(keys, _KEYS_PER_DELETE):
            await self._client.run("UNLINK", *chunk)

    async def purge(self, prefix: str) -> int:
        """Removes every stream and blob whose name begins with `prefix`; returns how many.

        Raises:
            ValueError: the prefix is empty, which would empty the server.
        """
        if not prefix:
            raise ValueError("purge needs a prefix: an empty one would empty the whole server")
        pattern = "".join(f"\\{letter}" if letter in "*?[]\\^-" else letter for letter in prefix) + "*"
        removed: set[bytes] = set()
        cursor = b"0"
        while True:
            cursor, keys = await self._client.run("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            await self._unlink(keys)
            removed.update(keys)
            if int(cursor) == 0:
                return len(removed)

    async def store_bytes(self) -> dict[str, int | None]:
        """Returns the memory that each blob store uses, by its name; None if it does not answer."""
        return {}

    async def used_bytes(self) -> int:
        """Returns the memory that the server uses for its data."""
        return int((await self._client.run("INFO", "memory"))["used_memory"])

    async def incarnation(self) -> str:
        """Returns the id of the server's process, which changes with a restart or a failover."""
        return str((await self._client.run("INFO", "server"))["run_id"])

    async def ping(self) -> None:
        """Raises BrokerError if the broker does not answer for 15 s or is too old for Paceline.

        Does not wait longer, because the address may be wrong when a run starts.
        """
        info = await self._client.run("INFO", "server", limit_s=_FIRST_CONTACT_S)
        version = str(info["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_SERVER:
            raise BrokerError(
                f"broker {self._client.server} is Redis {version}: 6.2 is the first that can reclaim and "
                "trim as Paceline needs it; install a newer one"
            )

    async def close(self) -> None:
        """Closes the connections to the server. The broker is unusable afterwards."""
        await self._client.close()


def _entry(stream: str, row: Any, deliveries: int = 1) -> Entry:
    entry_id, fields = row
    values = dict(zip(fields[::2], fields[1::2], strict=True))
    return Entry(
        stream=stream,
        entry_id=entry_id.decode(),
        payload=values.get(b"p", b""),
        traceparent=values.get(b"t", b"").decode(errors="replace"),
        deliveries=deliveries,
    )


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _batches(items: Iterable[_Item], size: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Splits a write into commands, each of which blocks the server for a short time only."""
    batch: list[_Item] = []
    num_bytes = 0
    for item in items:
        if batch and (len(batch) == _ITEMS_PER_COMMAND or num_bytes + size(item) > _BYTES_PER_COMMAND):
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += size(item)
    if batch:
        yield batch


def _size(message: Outgoing) -> int:
    return len(message.payload) + sum(map(len, (message.blobs or {}).values()))
