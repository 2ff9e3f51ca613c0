"""Ranges of ports, as settings and variables have them: FIRST-LAST."""

from __future__ import annotations

import re

from paceline.core.errors import ConfigError


def read_ports(words: str) -> range:
    """Reads a range such as "20000-20999".

    Raises:
        ConfigError: it has another form, or names no ports.
    """
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", words.strip())
    ports = range(int(match[1]), int(match[2]) + 1) if match else range(0)
    if not ports or ports[0] < 1024 or ports[-1] > 65535:
        raise ConfigError(f"{words!r} must be FIRST-LAST with ports from 1024 to 65535, say 20000-20999")
    return ports


def in_words(ports: range) -> str:
    """Returns the range as `read_ports` reads it."""
    return f"{ports[0]}-{ports[-1]}"
