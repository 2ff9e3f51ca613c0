"""Checks the broker's servers that the configuration lists: whether each blob store answers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from redis import asyncio as aioredis
from redis.exceptions import RedisError

from paceline.broker.address import STORES, check_reach, redact, tls_options, with_password
from paceline.checks.preflight_check import CheckNeed, PreflightCheck
from paceline.config.run import RunConfig
from paceline.core.errors import EnvironmentLackError

_PATIENCE_S = 3.0


def stores_line(config: RunConfig) -> str:
    """Checks that the blob stores of `broker.blob_stores` answer; returns their number.

    A run goes on without a store, but puts the trajectories of its servers on the broker's server instead.

    Raises:
        ConfigError: an address is unusable, or is on another machine and has no password.
        EnvironmentLackError: some stores do not answer, or refuse; the message says which, and why.
    """
    addresses = [with_password(at, os.environ, key=STORES) for at in config.broker.store_urls]
    for address in addresses:
        check_reach(address, insecure=config.broker.insecure, key=STORES)
    if faults := [fault for fault in asyncio.run(_faults(addresses)) if fault]:
        raise EnvironmentLackError(
            f"{len(faults)} of {len(addresses)} stores of {STORES} cannot be used: {'; '.join(faults)}. "
            "Start them (`paceline redis --blob-store`), correct the addresses or leave them out of the list"
        )
    return f"{len(addresses)} answer" if addresses else "none listed"


async def _faults(addresses: Sequence[str]) -> list[str]:
    """Returns for each store why it cannot be used; "" if it answers."""
    return await asyncio.gather(*map(_fault, addresses))


async def _fault(address: str) -> str:
    options: dict[str, Any] = {**tls_options(address, os.environ)}
    client: Any = aioredis.Redis.from_url(address, socket_timeout=_PATIENCE_S, **options)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await client.ping()
    except TimeoutError:
        return f"{redact(address)} has not answered for {_PATIENCE_S:g} s"
    except (RedisError, OSError, ValueError) as error:
        return f"{redact(address)}: {redact(str(error)).rstrip('.')}"
    finally:
        await client.aclose()
    return ""


CHECKS = (PreflightCheck(name="blob stores", run=stores_line, needs=CheckNeed.HERE),)
