"""Commands to a Redis server: one connection pool, a deadline on every attempt, waiting through outages."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from paceline.broker.address import redact, tls_options
from paceline.broker.redis.outage import Attempts, Outage, Say, Trouble
from paceline.broker.redis.redis_errors import is_missing, refusal, trouble_of

_CONNECT_TIMEOUT_S: Final = 5.0
_READ_SIZE: Final = 2**18
_RAW_COMMANDS: Final = ("XREADGROUP", "XREAD")


class GroupExistsError(Exception):
    """XGROUP CREATE found its group."""


class StreamMissingError(Exception):
    """A stream or group does not exist, or was deleted during the wait."""


class RedisClient:
    """Runs commands; each waits through outages of the server, as `Outage` describes.

    A command whose answer is lost is repeated: the server may carry it out twice.

    Args:
        url: redis://, rediss:// or unix:// address with the password in it.
        timeout_s: how long an attempt waits for the server's answer; for a blocking command, in addition to
            its wait.
        outage_timeout_s: longest outage of the server that commands wait through.
        is_store, on_outage, on_recovery: as in `Outage`.
        max_connections: size of the pool. Blocking commands use at most `max_connections -
            reserved_connections`, so that others always find a connection.
        reserved_connections: connections that blocking commands leave free.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 10.0,
        outage_timeout_s: float = 300.0,
        is_store: bool = False,
        on_outage: Say | None = None,
        on_recovery: Say | None = None,
        max_connections: int = 32,
        reserved_connections: int = 8,
    ) -> None:
        if not 0 < reserved_connections < max_connections:
            raise ValueError(
                f"reserved_connections is {reserved_connections}, must be in 1 to {max_connections - 1}"
            )
        self.server = redact(url)
        self.outage = Outage(
            self.server,
            timeout_s=outage_timeout_s,
            is_store=is_store,
            on_outage=on_outage,
            on_recovery=on_recovery,
        )
        self._timeout_s = timeout_s
        # Deadlines are set around whole commands; the client's socket timeout would cut blocking reads short.
        # Its own retries are off: `Outage` is the only policy.
        self._pool = aioredis.BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=None,
            protocol=2,
            socket_timeout=None,
            socket_connect_timeout=min(timeout_s, _CONNECT_TIMEOUT_S),
            socket_read_size=_READ_SIZE,
            retry=Retry(NoBackoff(), retries=0),
            **tls_options(url, os.environ),
        )
        self._redis: Any = aioredis.Redis(connection_pool=self._pool)
        for command in _RAW_COMMANDS:
            self._redis.set_response_callback(command, _as_it_is)
        self._blocking = asyncio.Semaphore(max_connections - reserved_connections)

    async def run(self, *words: Any, limit_s: float | None = None) -> Any:
        """Returns the server's reply; `limit_s` is the longest outage to wait through, if shorter.

        Raises:
            BrokerError: the outage lasted too long, or the server refuses the command.
            GroupExistsError, StreamMissingError: the group exists already, or the stream is missing.
        """
        return await self._repeat(
            words[0], lambda: self._redis.execute_command(*words), self._timeout_s, limit_s=limit_s
        )

    async def run_all(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Returns the server's replies to commands that it gets in one portion; as `run` otherwise.

        Raises:
            BrokerError: as in `run`. Some of the commands may have been carried out.
        """

        async def act() -> list[Any]:
            pipeline = self._redis.pipeline(transaction=False)
            for words in commands:
                pipeline.execute_command(*words)
            return list(await pipeline.execute())

        return list(await self._repeat(str(commands[0][0]), act, self._timeout_s)) if commands else []

    async def run_blocking(self, *words: Any, block_s: float) -> Any:
        """Returns the reply to a command that the server answers after up to `block_s` seconds."""

        async def block() -> Any:
            async with self._blocking:
                return await self._redis.execute_command(*words)

        return await self._repeat(words[0], block, self._timeout_s + block_s)

    async def run_script(
        self,
        source: str,
        keys: Sequence[str],
        arguments: Sequence[Any],
        *,
        before: Sequence[Sequence[Any]] = (),
        limit_s: float | None = None,
    ) -> Any:
        """Runs a script by its hash; sends its text to a server that does not know it.

        Args:
            before: commands that run immediately before the script, in a transaction with it: a writer, a
                connection or a server that dies leaves both or neither. They stay if the script refuses.
        """
        words = (len(keys), *keys, *arguments)
        name = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        try:
            return await self._run_last(before, ("EVALSHA", name, *words), limit_s)
        except _ScriptUnknownError:
            return await self._run_last(before, ("EVAL", source, *words), limit_s)

    async def _run_last(
        self, before: Sequence[Sequence[Any]], words: Sequence[Any], limit_s: float | None
    ) -> Any:
        """Returns the reply to the last command, in a transaction with those before it."""
        if not before:
            return await self.run(*words, limit_s=limit_s)

        async def act() -> Any:
            pipeline = self._redis.pipeline(transaction=True)
            for command in (*before, words):
                pipeline.execute_command(*command)
            return (await pipeline.execute())[-1]

        return await self._repeat(words[0], act, self._timeout_s, limit_s=limit_s)

    async def close(self) -> None:
        """Closes the connections to the server."""
        await self._redis.aclose(close_connection_pool=True)

    async def _repeat(
        self,
        command: str,
        act: Callable[[], Awaitable[Any]],
        timeout_s: float,
        *,
        limit_s: float | None = None,
    ) -> Any:
        with Attempts(self.outage, command, limit_s=limit_s) as attempts:
            while True:
                try:
                    async with asyncio.timeout(timeout_s):
                        reply = await act()
                except (RedisError, OSError, TimeoutError) as error:
                    trouble = self._passing_trouble(attempts, command, error)
                else:
                    attempts.answered()
                    return reply
                pause_s = attempts.failed(trouble)
                # Connections of a server that answers its readers are kept: a reader may be about to use a
                # connection that looks idle here.
                if trouble.may_move:
                    await self._drop_idle_connections()
                await asyncio.sleep(pause_s)

    def _passing_trouble(self, attempts: Attempts, command: str, error: Exception) -> Trouble:
        """Returns the trouble if waiting can end it; otherwise raises the error."""
        trouble = trouble_of(error, timeout_s=self._timeout_s)
        if trouble is not None:
            return trouble
        attempts.answered()
        if isinstance(error, NoScriptError):
            raise _ScriptUnknownError from error
        if is_missing(error):
            raise StreamMissingError(str(error)) from error
        if isinstance(error, ResponseError) and str(error).startswith("BUSYGROUP"):
            raise GroupExistsError from error
        raise refusal(error, server=self.server, command=command) from error

    async def _drop_idle_connections(self) -> None:
        """Makes the next attempt look the address up and reconnect: another server may have it now."""
        with contextlib.suppress(RedisError, OSError):
            await self._pool.disconnect(inuse_connections=False)


class _ScriptUnknownError(Exception):
    """The server does not know the script yet."""


def _as_it_is(response: Any, **_: Any) -> Any:
    """Keeps a reply in the server's own form, which does not change with the client's version."""
    return response
