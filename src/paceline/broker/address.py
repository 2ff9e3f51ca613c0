"""Broker addresses: their schemes, passwords and TLS, and how to show one without its password."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from urllib.parse import SplitResult, parse_qs, quote, urlsplit, urlunsplit

from paceline.core.errors import ConfigError
from paceline.service.addresses import is_loopback
from paceline.service.identity.credentials import CA_FILE, CERTIFICATE_FILE, KEY_FILE, TLS_DIR, secret

log = logging.getLogger(__name__)

_SCHEMES = frozenset({"redis", "rediss", "unix"})
REDIS_PASSWORD = "PACELINE_REDIS_PASSWORD"
URL, STORES = "broker.url", "broker.blob_stores"
"""The settings that have addresses."""


def redact(text: str) -> str:
    """Returns the text with `***` in place of the user and password of every address in it.

    In a Redis address, everything up to the last @ of the line is replaced, because a password that is not
    percent-encoded may hold any character.
    """
    text = re.sub(r"\b(rediss?|unix)://[^\n]*@", r"\1://***@", text)
    text = re.sub(r"://\S*@", "://***@", text)
    return re.sub(r"(?i)([?&](?:username|password)=)[^&#\s'\"]*", r"\1***", text)


def with_password(url: str, environ: Mapping[str, str], *, key: str = URL) -> str:
    """Adds the password of the file that PACELINE_REDIS_PASSWORD_FILE names to an address that has none.

    Raises:
        ConfigError: the file cannot be read or is empty.
    """
    password = secret(REDIS_PASSWORD, environ)
    parts = split(url, key=key)
    user, at, host = parts.netloc.rpartition("@")
    if not password or ":" in user:
        return url
    return urlunsplit(parts._replace(netloc=f"{user if at else ''}:{quote(password, safe='')}@{host}"))


def check_reach(url: str, *, insecure: bool, key: str = URL) -> None:
    """Refuses a Redis server on another machine that asks for no password, unless `insecure` is set.

    Raises:
        ConfigError: there is no password, or the address cannot be read.
    """
    parts = split(url, key=key)
    if parts.scheme == "unix" or is_loopback(parts.hostname or "127.0.0.1"):
        return
    if not (parts.password or "password" in parse_qs(parts.query)) and not insecure:
        raise ConfigError(
            f"{key} {redact(url)!r} is on another machine and has no password: everyone there can "
            "change what is trained on. Give it a user (`paceline certs acl` prints the line) and set "
            f"{REDIS_PASSWORD}_FILE; or, on a network that you trust fully, set broker.insecure: true"
        )
    if parts.scheme == "redis":
        log.warning("%s is reached in plain text: rediss:// encrypts", redact(url))


def split(url: str, *, key: str = URL) -> SplitResult:
    """Returns the parts of an address; `key` is the setting that has it, for messages.

    Raises:
        ConfigError: the scheme is unknown, or the address cannot be read; the reason is left out, because it
            may hold a part of the password.
    """
    scheme = url.partition(":")[0]
    if scheme not in _SCHEMES:
        raise ConfigError(
            f"{key} {redact(url)!r} has the scheme {scheme!r}; write redis://[:password@]host:port/db, "
            "rediss:// for TLS, or unix://[:password@]/path/to/socket"
        )
    try:
        parts = urlsplit(url)
        _ = parts.port, parts.hostname
    except ValueError:
        raise ConfigError(
            f"{key} {redact(url)!r} cannot be used: is its port a number? In a password write %40 for "
            "@, %3A for :, %2F for /, %3F for ?, %23 for # and %25 for %"
        ) from None
    return parts


def tls_options(url: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the options of a rediss:// client: the files of PACELINE_TLS_DIR, read by each connection."""
    folder = environ.get(TLS_DIR)
    if not url.startswith("rediss:") or not folder:
        return {}
    names = {"ssl_ca_certs": CA_FILE, "ssl_certfile": CERTIFICATE_FILE, "ssl_keyfile": KEY_FILE}
    return {option: os.path.join(folder, name) for option, name in names.items() if option not in url}
