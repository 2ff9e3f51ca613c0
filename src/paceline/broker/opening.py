"""Opens the broker that an address names."""

from __future__ import annotations

from paceline.broker.address import split
from paceline.broker.base import Broker
from paceline.broker.redis.outage import Say
from paceline.broker.redis.redis_client import RedisClient
from paceline.broker.redis.redis_streams import RedisStreamsBroker


def open_broker(
    url: str,
    *,
    timeout_s: float = 10.0,
    outage_timeout_s: float = 300.0,
    on_outage: Say | None = None,
    on_recovery: Say | None = None,
) -> Broker:
    """Makes a broker for redis://, rediss:// or unix://; only its first command connects.

    Args:
        timeout_s: how long an attempt of a command waits for the server's answer.
        outage_timeout_s: longest outage of a server that commands wait through; see `Outage`.
        on_outage: called with a sentence once an outage has lasted for 2 s.
        on_recovery: called with a sentence when such an outage is over.

    Raises:
        ConfigError: the address is unusable.
    """
    split(url)
    client = RedisClient(
        url,
        timeout_s=timeout_s,
        outage_timeout_s=outage_timeout_s,
        on_outage=on_outage,
        on_recovery=on_recovery,
    )
    return RedisStreamsBroker(client)
