"""Broker addresses: which kinds there are, and how one is shown without its password."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from paceline.core.errors import ConfigError

REDIS_SCHEMES = frozenset({"redis", "rediss", "unix"})
MEMORY_SCHEME = "memory"


def scheme_of(url: str) -> str:
    """The address's scheme.

    Raises:
        ConfigError: it is none that Paceline knows.
    """
    scheme = urlsplit(url).scheme
    if scheme not in REDIS_SCHEMES | {MEMORY_SCHEME}:
        raise ConfigError(
            f"broker.url {redact(url)!r} has the scheme {scheme!r}; write redis://[:password@]host:port/db, rediss:// for "
            "TLS, unix://[:password@]/path/to/socket, or memory:// for tests inside one process"
        )
    return scheme


def redact(url: str) -> str:
    """The address with `***` where user and password stand."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))
