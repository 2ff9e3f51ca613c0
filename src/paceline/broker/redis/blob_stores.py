"""Blobs in stores of their own: further servers without durability, one per host; keys name them.

    append -> blobs to their stores -> messages, and blobs whose store is away, to the broker's server
    get    -> the store that a key names -> what is not there: the broker's server

A store keeps nothing on disk: one that dies has lost its blobs. Commands wait for a store for a short time
only, because everything that it holds can be drawn again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from paceline.broker.base import Ack, Outgoing
from paceline.broker.names import store_of
from paceline.broker.redis.redis_client import RedisClient
from paceline.broker.redis.redis_streams import RedisStreamsBroker
from paceline.core.errors import BrokerError

log = logging.getLogger(__name__)

_REST_S: Final = 5.0
_MAX_UNDELETED: Final = 1_000_000


class BlobStore:
    """One store, as the broker sees it: reading finds nothing while the store is away."""

    def __init__(self, client: RedisClient) -> None:
        self._server, self._blobs = client.server, RedisStreamsBroker(client)
        self._rests_until_s = 0.0
        self._undeleted: list[str] = []

    async def put(self, blobs: Mapping[str, bytes]) -> bool:
        """Stores blobs; returns whether all of them are stored."""
        if not self._is_away:
            with self._resting_after_errors():
                await self._blobs.put_blobs(blobs)
                return True
        return False

    async def fetch(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values in the order of the keys, None for a missing one."""
        if not self._is_away:
            with self._resting_after_errors():
                return await self._blobs.get_blobs(keys)
        return [None] * len(keys)

    async def missing(self, keys: Sequence[str]) -> list[str]:
        """Returns the keys that have no value."""
        if not self._is_away:
            with self._resting_after_errors():
                return await self._blobs.missing_blobs(keys)
        return list(keys)

    async def delete(self, keys: Sequence[str]) -> None:
        """Removes blobs; while the store is away, they are removed with the next ones."""
        self._undeleted = [*self._undeleted, *keys][-_MAX_UNDELETED:]
        if not self._is_away:
            with self._resting_after_errors():
                await self._blobs.delete_blobs(self._undeleted)
                self._undeleted = []

    async def purge(self, prefix: str) -> int:
        """Removes every blob whose name begins with `prefix`; returns how many."""
        num_removed = 0
        with self._resting_after_errors():
            num_removed += await self._blobs.purge(prefix)
        return num_removed

    async def used_bytes(self) -> int | None:
        """Returns the memory that the store uses; None while it is away."""
        if not self._is_away:
            with self._resting_after_errors():
                return await self._blobs.used_bytes()
        return None

    async def ping(self) -> None:
        """Raises BrokerError if the store does not answer."""
        await self._blobs.ping()

    async def close(self) -> None:
        """Closes the connections to the store."""
        await self._blobs.close()

    @property
    def _is_away(self) -> bool:
        return time.monotonic() < self._rests_until_s

    @contextlib.contextmanager
    def _resting_after_errors(self) -> Iterator[None]:
        """Leaves the store alone for some seconds after an error, so that not every command waits for it."""
        try:
            yield
        except BrokerError as error:
            self._rests_until_s = time.monotonic() + _REST_S
            log.warning("blobs go without the store %s for %g s: %s", self._server, _REST_S, error)


class StoresBroker(RedisStreamsBroker):
    """Implements `Broker` with blobs in stores.

    Args:
        client: the server of the streams.
        stores: the stores by name.
        store: the store for new blobs of this process; "": its blobs stay with the streams.
    """

    def __init__(self, client: RedisClient, stores: Mapping[str, BlobStore], *, store: str = "") -> None:
        super().__init__(client)
        self._stores, self.store, self.has_stores = stores, store, True

    async def append(self, messages: Sequence[Outgoing], *, ack: Ack | None = None) -> list[str]:
        """Stores messages in order, each with its blobs before it, and acknowledges; returns entry ids."""
        blobs = {key: value for message in messages for key, value in (message.blobs or {}).items()}
        stored: set[str] = set()
        for store, keys in self._by_store(blobs):
            if await store.put({key: blobs[key] for key in keys}):
                stored.update(keys)
        if stored:
            messages = [replace(message, blobs=_without(message.blobs, stored)) for message in messages]
        return await super().append(messages, ack=ack)

    async def put_blob(self, key: str, value: bytes) -> None:
        """Stores a blob without a message; replaces an earlier value."""
        store = self._stores.get(store_of(key))
        if store is None or not await store.put({key: value}):
            await super().put_blob(key, value)

    async def get_blobs(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values in the order of the keys, None for a missing one."""
        values: dict[str, bytes | None] = {}
        for store, own in self._by_store(keys):
            values |= zip(own, await store.fetch(own), strict=True)
        rest = [key for key in keys if values.get(key) is None]
        values |= zip(rest, await super().get_blobs(rest), strict=True)
        return [values[key] for key in keys]

    async def missing_blobs(self, keys: Sequence[str]) -> list[str]:
        """Returns those of the keys that have no value, without fetching the others' values."""
        by_store = list(self._by_store(keys))
        rest = set(keys).difference(*(own for _, own in by_store))
        for store, own in by_store:
            rest.update(await store.missing(own))
        return await super().missing_blobs([key for key in keys if key in rest])

    async def delete_blobs(self, keys: Sequence[str]) -> None:
        """Removes blobs; missing ones are ignored. The broker's server may have those of any store."""
        for store, own in self._by_store(keys):
            await store.delete(own)
        await super().delete_blobs(keys)

    async def purge(self, prefix: str) -> int:
        """Removes every stream and blob whose name begins with `prefix`; returns how many."""
        num_removed = await super().purge(prefix)
        return num_removed + sum([await store.purge(prefix) for store in self._stores.values()])

    async def store_bytes(self) -> dict[str, int | None]:
        """Returns the memory that each blob store uses, by its name; None if it does not answer."""
        return {name: await store.used_bytes() for name, store in self._stores.items()}

    async def ping(self) -> None:
        """Raises BrokerError if the broker's server does not answer; a store that does not is only logged."""
        await super().ping()
        for store in self._stores.values():
            try:
                await store.ping()
            except BrokerError as error:
                log.warning("a blob store is away: %s", error)

    async def close(self) -> None:
        """Closes the connections to the servers. The broker is unusable afterwards."""
        await super().close()
        for store in self._stores.values():
            await store.close()

    def _by_store(self, keys: Iterable[str]) -> Iterable[tuple[BlobStore, list[str]]]:
        """Returns the keys of each store; those that name none, or an unknown one, are left out."""
        by_name: defaultdict[str, list[str]] = defaultdict(list)
        for key in keys:
            by_name[store_of(key)].append(key)
        return [(self._stores[name], own) for name, own in by_name.items() if name in self._stores]


def _without(blobs: Mapping[str, bytes] | None, stored: set[str]) -> dict[str, bytes]:
    return {key: value for key, value in (blobs or {}).items() if key not in stored}
