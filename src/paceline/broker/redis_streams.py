"""The broker over Redis Streams: one connection pool, a deadline on every attempt, patience in an outage."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from paceline.broker import scripts
from paceline.broker.address import redact
from paceline.broker.base import Ack, Entry, Outgoing
from paceline.broker.outage import Attempts, Outage, Say
from paceline.broker.redis_errors import is_missing, refusal, trouble_of
from paceline.core.errors import BrokerError

log = logging.getLogger(__name__)

RELEASED_IDLE_MS: Final = 24 * 3600 * 1000
"""Idle time of a released entry: more than any lease."""

_MESSAGES_PER_APPEND: Final = 256
_BYTES_PER_APPEND: Final = 8 * 2**20
_KEYS_PER_FETCH: Final = 64
_KEYS_PER_DELETE: Final = 1000
_OLDEST_SERVER: Final = (6, 2)
_FIRST_CONTACT_S: Final = 15.0
_RAW_COMMANDS: Final = ("XREADGROUP", "XREAD", "XPENDING", "XINFO GROUPS")

T = TypeVar("T")


class RedisStreamsBroker:
    """Implements `Broker` on one Redis or Valkey server, 6.2 or later.

    Args:
        url: redis://, rediss:// or unix:// address with the password in it.
        timeout_s: how long an attempt waits for the server's answer; for a blocking read, beyond its wait.
        outage_timeout_s: longest outage of the server that commands wait through.
        on_outage, on_recovery: as in `Outage`.
        max_connections: size of the pool. Blocking reads use at most `max_connections -
            reserved_connections`, so that other commands always find a connection.
        reserved_connections: connections that blocking reads leave free.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 10.0,
        outage_timeout_s: float = 300.0,
        on_outage: Say | None = None,
        on_recovery: Say | None = None,
        max_connections: int = 32,
        reserved_connections: int = 8,
    ) -> None:
        if not 0 < reserved_connections < max_connections:
            raise ValueError(
                f"reserved_connections is {reserved_connections}, must be in 1 to {max_connections - 1}"
            )
        self._url = url
        self._timeout_s = timeout_s
        self._outage = Outage(
            redact(url), timeout_s=outage_timeout_s, on_outage=on_outage, on_recovery=on_recovery
        )
        # Deadlines are set around whole commands; the client's socket timeout would cut blocking reads short.
        pool = aioredis.BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=None,
            protocol=2,
            socket_timeout=None,
            socket_connect_timeout=min(timeout_s, 5.0),
            socket_read_size=2**18,
            retry=Retry(NoBackoff(), retries=0),
        )
        self._client: Any = aioredis.Redis(connection_pool=pool)
        for command in _RAW_COMMANDS:
            self._client.set_response_callback(command, _as_it_is)
        self._blocking = asyncio.Semaphore(max_connections - reserved_connections)

    async def ensure_group(self, stream: str, group: str) -> None:
        """Creates stream and group where they are missing; the group starts at the stream's first entry."""
        try:
            await self._run("XGROUP CREATE", stream, group, "0", "MKSTREAM")
        except _GroupExistsError:
            return

    async def append(self, messages: Sequence[Outgoing], *, ack: Ack | None = None) -> list[str]:
        """Stores messages in order, each with its blobs before it, and acknowledges; returns entry ids."""
        ids: list[str] = []
        batches = list(_batches(messages))
        for batch in batches[:-1]:
            ids += await self._append_batch(batch, None)
        if batches or ack is not None:
            ids += await self._append_batch(batches[-1] if batches else [], ack)
        return ids

    async def _append_batch(self, messages: Sequence[Outgoing], ack: Ack | None) -> list[str]:
        blobs = [item for message in messages if message.blobs for item in message.blobs.items()]
        keys = [key for key, _ in blobs]
        keys += [message.stream for message in messages]
        arguments: list[Any] = [len(blobs), len(messages)]
        arguments += [value for _, value in blobs]
        for message in messages:
            arguments += (message.payload, message.traceparent)
        if ack is not None:
            keys.append(ack.stream)
            arguments += (ack.group, *ack.entry_ids)
        return [entry_id.decode() for entry_id in await self._script(scripts.APPEND, keys, arguments)]

    async def read(
        self, stream: str, group: str, consumer: str, *, max_entries: int, block_s: float
    ) -> list[Entry]:
        """Takes undelivered entries; waits up to `block_s` seconds for the first; [] when none came."""
        started = time.monotonic()
        command = ("XREADGROUP", "GROUP", group, consumer, "COUNT", max_entries)
        try:
            return await self._read(command, stream, ">", block_s)
        except _StreamMissingError as error:
            log.warning("nothing to read: %s", error)
            await asyncio.sleep(max(0.0, block_s - (time.monotonic() - started)))
            return []

    async def read_log(self, stream: str, *, after: str, max_entries: int, block_s: float) -> list[Entry]:
        """Entries after the id `after`; waits up to `block_s` seconds for the first; [] when none came."""
        return await self._read(("XREAD", "COUNT", max_entries), stream, after, block_s)

    async def _read(self, command: Sequence[Any], stream: str, after: str, block_s: float) -> list[Entry]:
        if block_s > 0:
            block_ms = max(1, round(block_s * 1000))  # BLOCK 0 would mean for ever
            words = (*command, "BLOCK", block_ms, "STREAMS", stream, after)
            reply = await self._retry(command[0], lambda: self._block(words), self._timeout_s + block_s)
        else:
            reply = await self._run(*command, "STREAMS", stream, after)
        return [_entry(stream, row) for row in reply[0][1]] if reply else []

    async def _block(self, words: Sequence[Any]) -> Any:
        async with self._blocking:
            return await self._client.execute_command(*words)

    async def reclaim(
        self, stream: str, group: str, consumer: str, *, min_idle_s: float, max_entries: int
    ) -> list[Entry]:
        """Takes over entries that no consumer has renewed for `min_idle_s` seconds.

        None soon after an outage: consumers that could not renew their leases then are not dead.
        """
        if not self._outage.is_recent(min_idle_s):
            arguments = [group, consumer, round(min_idle_s * 1000), max_entries]
            try:
                rows = await self._script(scripts.RECLAIM, [stream], arguments, limit_s=0.0)
                return [_entry(stream, row[:2], deliveries=row[2]) for row in rows]
            except _StreamMissingError:
                return []
            except BrokerError:
                if not self._outage.is_on:
                    raise
        if self._outage.is_on:
            await self._run("PING")
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
            own_ids = await self._script(scripts.TOUCH, [stream], [group, consumer, idle_ms, *entry_ids])
        except _StreamMissingError:
            return []
        return [entry_id.decode() for entry_id in own_ids]

    async def ack(self, stream: str, group: str, entry_ids: Sequence[str]) -> None:
        """Acknowledges entries: they are not delivered again. Unknown ids are ignored."""
        if entry_ids:
            await self._run("XACK", stream, group, *entry_ids)

    async def advance(self, stream: str, group: str, entry_id: str) -> None:
        """Says that a group which reads the stream as a log has done everything up to `entry_id`."""
        with contextlib.suppress(_StreamMissingError):
            await self._run("XGROUP SETID", stream, group, entry_id)

    async def length(self, stream: str) -> int:
        """Number of entries in the stream, read or not."""
        return int(await self._run("XLEN", stream))

    async def trim(self, stream: str) -> int:
        """Removes entries that every group has done; never a pending one. Returns how many.

        A stream without groups keeps everything: it has no reader yet.
        """
        try:
            groups = [_pairs(row) for row in await self._run("XINFO GROUPS", stream)]
            if not groups:
                return 0
            floors = [_successor(group["last-delivered-id"].decode()) for group in groups]
            pending = [group["name"] for group in groups if group["pending"]]
            summaries = await self._pipeline([("XPENDING", stream, name) for name in pending])
        except _StreamMissingError:
            return 0
        floors += [summary[1].decode() for summary in summaries if summary[0]]
        # The floor stays valid between these commands: deliveries and acknowledgements only move it upwards.
        return int(await self._run("XTRIM", stream, "MINID", "=", min(floors, key=_order)))

    async def delete_streams(self, streams: Sequence[str]) -> None:
        """Removes streams with their groups."""
        await self._unlink(streams)

    async def put_blob(self, key: str, value: bytes) -> None:
        """Stores a blob without a message; replaces an earlier value."""
        await self._run("SET", key, value)

    async def get_blobs(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values in the order of the keys, None for a missing one."""
        values: list[bytes | None] = []
        for chunk in _chunks(keys, _KEYS_PER_FETCH):
            values += await self._run("MGET", *chunk)
        return values

    async def delete_blobs(self, keys: Sequence[str]) -> None:
        """Removes blobs; missing ones are ignored."""
        await self._unlink(keys)

    async def _unlink(self, keys: Sequence[str | bytes]) -> None:
        for chunk in _chunks(keys, _KEYS_PER_DELETE):
            await self._run("UNLINK", *chunk)

    async def purge(self, prefix: str) -> int:
        """Removes every stream and blob whose name begins with `prefix`; returns how many.

        Raises:
            ValueError: an empty prefix, which would empty the server.
        """
        if not prefix:
            raise ValueError("purge needs a prefix: an empty one would empty the whole server")
        pattern = "".join(f"\\{letter}" if letter in "*?[]\\^-" else letter for letter in prefix) + "*"
        removed: set[bytes] = set()
        cursor = b"0"
        while True:
            cursor, keys = await self._run("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            await self._unlink(keys)
            removed.update(keys)
            if int(cursor) == 0:
                return len(removed)

    async def ping(self) -> None:
        """Raises BrokerError where the broker does not answer for 15 s or is too old for Paceline.

        Waits no longer than that: at a start the address may be wrong.
        """
        info = await self._run("INFO", "server", limit_s=_FIRST_CONTACT_S)
        version = str(info["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_SERVER:
            raise BrokerError(
                f"broker {redact(self._url)} is Redis {version}: 6.2 is the first that can reclaim and "
                "trim as Paceline needs it; install a newer one"
            )

    async def close(self) -> None:
        """Closes the connections. The broker is unusable afterwards."""
        await self._client.aclose(close_connection_pool=True)

    async def _script(
        self, source: str, keys: Sequence[str], arguments: Sequence[Any], *, limit_s: float | None = None
    ) -> Any:
        """Runs a script by its hash; sends its text to a server that does not know it."""
        words = (len(keys), *keys, *arguments)
        name = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        try:
            return await self._run("EVALSHA", name, *words, limit_s=limit_s)
        except _ScriptUnknownError:
            return await self._run("EVAL", source, *words, limit_s=limit_s)

    async def _run(self, *words: Any, limit_s: float | None = None) -> Any:
        return await self._retry(
            words[0], lambda: self._client.execute_command(*words), self._timeout_s, limit_s=limit_s
        )

    async def _pipeline(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Several commands in one round trip."""
        if not commands:
            return []

        async def run() -> list[Any]:
            pipeline = self._client.pipeline(transaction=False)
            for words in commands:
                pipeline.execute_command(*words)
            replies: list[Any] = await pipeline.execute()
            return replies

        return await self._retry(commands[0][0], run, self._timeout_s)

    async def _retry(
        self,
        command: str,
        act: Callable[[], Awaitable[T]],
        timeout_s: float,
        *,
        limit_s: float | None = None,
    ) -> T:
        """Repeats a command through an outage; each attempt has `timeout_s` seconds."""
        with Attempts(self._outage, command, limit_s=limit_s) as attempts:
            while True:
                try:
                    async with asyncio.timeout(timeout_s):
                        reply = await act()
                except (RedisError, OSError, TimeoutError) as error:
                    pause_s = self._pause_s(attempts, command, error)
                else:
                    attempts.answered()
                    return reply
                await self._drop_idle_connections()
                await asyncio.sleep(pause_s)

    def _pause_s(self, attempts: Attempts, command: str, error: Exception) -> float:
        """Seconds until the next attempt; raises what waiting does not mend."""
        trouble = trouble_of(error, timeout_s=self._timeout_s)
        if trouble is not None:
            return attempts.failed(trouble)
        attempts.answered()
        if isinstance(error, NoScriptError):
            raise _ScriptUnknownError from error
        if is_missing(error):
            raise _StreamMissingError(str(error)) from error
        if isinstance(error, ResponseError) and str(error).startswith("BUSYGROUP"):
            raise _GroupExistsError from error
        raise refusal(error, url=self._url, command=command) from error

    async def _drop_idle_connections(self) -> None:
        """Makes the next attempt connect anew and look the address up: another server may have it now."""
        with contextlib.suppress(RedisError, OSError):
            await self._client.connection_pool.disconnect(inuse_connections=False)


class _GroupExistsError(Exception):
    """XGROUP CREATE found its group."""


class _StreamMissingError(Exception):
    """A stream or group does not exist."""


class _ScriptUnknownError(Exception):
    """The server does not know the script yet."""


def _as_it_is(response: Any, **_: Any) -> Any:
    """Keeps a reply in the server's own shape, which does not change with the client's version."""
    return response


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


def _pairs(row: Sequence[Any]) -> dict[str, Any]:
    return {name.decode(): value for name, value in zip(row[::2], row[1::2], strict=True)}


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number)


def _successor(entry_id: str) -> str:
    milliseconds, number = _order(entry_id)
    return f"{milliseconds}-{number + 1}"


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _batches(messages: Iterable[Outgoing]) -> Iterator[list[Outgoing]]:
    """Splits messages into appends that block the server for a short time only."""
    batch: list[Outgoing] = []
    num_bytes = 0
    for message in messages:
        size = len(message.payload) + sum(map(len, (message.blobs or {}).values()))
        if batch and (len(batch) == _MESSAGES_PER_APPEND or num_bytes + size > _BYTES_PER_APPEND):
            yield batch
            batch, num_bytes = [], 0
        batch.append(message)
        num_bytes += size
    if batch:
        yield batch
