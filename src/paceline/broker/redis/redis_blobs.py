"""Blobs without an event loop, for the learner's ranks, which fetch their own rows."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from paceline.broker.address import redact, split, tls_options
from paceline.broker.names import store_of
from paceline.broker.redis.outage import STORE_PATIENCE_S, Attempts, Outage
from paceline.broker.redis.redis_errors import refusal, trouble_of
from paceline.core.errors import BrokerError, LostDataError

log = logging.getLogger(__name__)

_KEYS_PER_FETCH: Final = 64
_KEYS_NAMED: Final = 5


class BlobClient:
    """A synchronous connection that fetches and stores blobs by key; a context manager.

    Args:
        stores: addresses of the blob stores, as in `open_broker`.
        outage_timeout_s: longest outage of the server that a request waits through.
        timeout_s: how long an attempt waits for the server's answer; a request fetches at most 64 blobs.
        is_store: whether the address is a store's.
    """

    def __init__(
        self,
        url: str,
        *,
        stores: Sequence[str] = (),
        outage_timeout_s: float = 300.0,
        timeout_s: float = 30.0,
        is_store: bool = False,
    ) -> None:
        split(url)
        self._url, self._timeout_s = url, timeout_s
        self._outage = Outage(redact(url), timeout_s=outage_timeout_s, is_store=is_store)
        self._stores = {
            str(number): BlobClient(
                address,
                outage_timeout_s=min(outage_timeout_s, STORE_PATIENCE_S),
                timeout_s=min(timeout_s, STORE_PATIENCE_S),
                is_store=True,
            )
            for number, address in enumerate(stores)
        }
        self._client: redis.Redis = redis.Redis.from_url(
            url,
            protocol=2,
            socket_timeout=timeout_s,
            socket_connect_timeout=min(timeout_s, 5.0),
            retry=Retry(NoBackoff(), retries=0),
            **tls_options(url, os.environ),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the values in the order of the keys.

        Raises:
            LostDataError: blobs are missing; the message names them.
            BrokerError: the broker is gone.
        """
        values: dict[str, bytes | None] = {}
        for name, store in self._stores.items():
            own = [key for key in keys if store_of(key) == name]
            try:
                values |= zip(own, store._fetch_all(own), strict=True)
            except BrokerError as error:
                log.warning("blobs of a store are looked for at the broker: %s", error)
        rest = [key for key in keys if values.get(key) is None]
        values |= zip(rest, self._fetch_all(rest), strict=True)
        present = [value for key in keys if (value := values[key]) is not None]
        if len(present) < len(keys):
            missing = [key for key in keys if values[key] is None]
            more = f" and {len(missing) - _KEYS_NAMED} more" if len(missing) > _KEYS_NAMED else ""
            raise LostDataError(
                f"{len(missing)} of {len(keys)} blobs are not at the broker {redact(self._url)}: "
                f"{', '.join(missing[:_KEYS_NAMED])}{more}; they were deleted, or the server lost its data"
            )
        return present

    def _fetch_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values on this server, None for a missing one."""
        values: list[bytes | None] = []
        for start in range(0, len(keys), _KEYS_PER_FETCH):
            values += self._fetch(keys[start : start + _KEYS_PER_FETCH])
        return values

    def _fetch(self, keys: Sequence[str]) -> list[bytes | None]:
        with Attempts(self._outage, "MGET") as attempts:
            while True:
                try:
                    values: Any = self._client.mget(keys)
                except (RedisError, OSError) as error:
                    trouble = trouble_of(error, timeout_s=self._timeout_s)
                    if trouble is None:
                        raise refusal(error, server=redact(self._url), command="MGET") from error
                    pause_s = attempts.failed(trouble)
                else:
                    attempts.answered()
                    return list(values)
                self._client.connection_pool.disconnect()
                time.sleep(pause_s)

    def put(self, blobs: Mapping[str, bytes]) -> None:
        """Stores blobs that the run does not depend on; does not wait through an outage.

        Raises:
            BrokerError: the server did not take all of them.
        """
        for name, store in self._stores.items():
            store.put({key: value for key, value in blobs.items() if store_of(key) == name})
        keys = [key for key in blobs if store_of(key) not in self._stores]
        try:
            for start in range(0, len(keys), _KEYS_PER_FETCH):
                with self._client.pipeline(transaction=False) as commands:
                    for key in keys[start : start + _KEYS_PER_FETCH]:
                        commands.set(key, blobs[key])
                    commands.execute()
        except (RedisError, OSError) as error:
            self._client.connection_pool.disconnect()
            raise BrokerError(f"the broker {redact(self._url)} did not store blobs: {error}") from error

    def close(self) -> None:
        """Closes the connections to the servers."""
        self._client.close()
        for store in self._stores.values():
            store.close()
