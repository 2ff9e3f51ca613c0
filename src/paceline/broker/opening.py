"""Opens the broker that an address names."""

from __future__ import annotations

from urllib.parse import urlsplit

from paceline.broker.address import MEMORY_SCHEME, redact, scheme_of
from paceline.broker.base import Broker
from paceline.broker.memory import MemoryBroker, named_store
from paceline.broker.redis_streams import RedisStreamsBroker
from paceline.core.errors import ConfigError


def open_broker(url: str, *, timeout_s: float = 10.0) -> Broker:
    """A broker for redis://, rediss:// or unix:// (`ping` connects, this does not), or for memory://[NAME].

    Memory brokers of the same name in one process share their streams; without a name each has its own.

    Args:
        url: the address.
        timeout_s: deadline of a command.

    Raises:
        ConfigError: the address is unusable.
    """
    if scheme_of(url) == MEMORY_SCHEME:
        return MemoryBroker(store=named_store(urlsplit(url).netloc))
    try:
        return RedisStreamsBroker(url, timeout_s=timeout_s)
    except ValueError as error:
        raise ConfigError(f"broker.url {redact(url)!r} cannot be used: {error}") from error
