"""Opens the broker that an address names, with its blob stores."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

from paceline.broker.address import STORES, split
from paceline.broker.base import Broker
from paceline.broker.redis.blob_stores import BlobStore, StoresBroker
from paceline.broker.redis.outage import STORE_PATIENCE_S, Say
from paceline.broker.redis.redis_client import RedisClient
from paceline.broker.redis.redis_streams import RedisStreamsBroker
from paceline.service.addresses import is_of_this_machine


def open_broker(
    url: str,
    *,
    stores: Sequence[str] = (),
    writer: str = "",
    timeout_s: float = 10.0,
    outage_timeout_s: float = 300.0,
    on_outage: Say | None = None,
    on_recovery: Say | None = None,
) -> Broker:
    """Makes a broker for redis://, rediss:// or unix://; only its first command connects.

    Args:
        stores: addresses of the blob stores; a store's name is its place in this list.
        writer: id of the member whose new blobs go to a store of its machine, if there is one, else to any;
            "": they stay with the streams.
        timeout_s: how long an attempt of a command waits for the server's answer.
        outage_timeout_s: longest outage of a server that commands wait through; see `Outage`. For a store it
            is at most 5 s.
        on_outage: called with a sentence once an outage has lasted for 2 s.
        on_recovery: called with a sentence when such an outage is over.

    Raises:
        ConfigError: an address is unusable.
    """
    split(url)
    for address in stores:
        split(address, key=STORES)
    client = RedisClient(
        url,
        timeout_s=timeout_s,
        outage_timeout_s=outage_timeout_s,
        on_outage=on_outage,
        on_recovery=on_recovery,
    )
    if not stores:
        return RedisStreamsBroker(client)
    by_name = {
        str(number): BlobStore(
            RedisClient(
                address,
                timeout_s=min(timeout_s, STORE_PATIENCE_S),
                outage_timeout_s=min(outage_timeout_s, STORE_PATIENCE_S),
                is_store=True,
                on_outage=on_outage,
                on_recovery=on_recovery,
            )
        )
        for number, address in enumerate(stores)
    }
    return StoresBroker(client, by_name, store=nearest_store(stores, writer) if writer else "")


def nearest_store(stores: Sequence[str], writer: str) -> str:
    """Returns the name of a store on this machine, or of any if there is none here.

    Writers whose ids end in consecutive numbers are spread evenly.
    """
    hosts = [split(address).hostname for address in stores]
    names = [number for number, host in enumerate(hosts) if host is None or is_of_this_machine(host)]
    names = names or list(range(len(stores)))
    number = re.search(r"\d+$", writer)
    return str(names[(int(number[0]) if number else zlib.crc32(writer.encode())) % len(names)])
