"""Ranges of ports, which settings and variables give as FIRST-LAST."""

from __future__ import annotations

import re

from paceline.core.errors import ConfigError


def read_ports(words: str) -> range:
    """Reads a range such as "20000-20999".

    Raises:
        ConfigError: the words have a different form, or are not ports.
    """
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", words.strip())
    ports = range(int(match[1]), int(match[2]) + 1) if match else range(0)
    if not ports or ports[0] < 1024 or ports[-1] > 65535:
        raise ConfigError(f"{words!r} must be FIRST-LAST with ports from 1024 to 65535, such as 20000-20999")
    return ports


def in_words(ports: range) -> str:
    """Writes the range in the form that `read_ports` reads."""
    return f"{ports[0]}-{ports[-1]}"
