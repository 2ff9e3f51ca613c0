"""Broker addresses: their schemes, and how to show an address without its password."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from paceline.core.errors import ConfigError

REDIS_SCHEMES = frozenset({"redis", "rediss", "unix"})
MEMORY_SCHEME = "memory"


def scheme_of(url: str) -> str:
    """The address's scheme.

    Raises:
        ConfigError: the scheme is unknown.
    """
    scheme = urlsplit(url).scheme
    if scheme not in REDIS_SCHEMES | {MEMORY_SCHEME}:
        raise ConfigError(
            f"broker.url {redact(url)!r} has the scheme {scheme!r}; write redis://[:password@]host:port/db, "
            "rediss:// for TLS, unix://[:password@]/path/to/socket, or memory:// for tests inside one process"
        )
    return scheme


def redact(text: str) -> str:
    """The text with `***` in place of the user and password of every address in it."""
    return re.sub(r"://\S*@", "://***@", text)
