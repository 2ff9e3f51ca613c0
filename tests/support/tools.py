"""Tools for tests: good ones, and each way to be bad."""

from __future__ import annotations

import os
import time


def add(a: int, b: int = 0) -> int:
    """Adds two numbers."""
    return a + b


def quote(word: str) -> str:
    """Quotes a word."""
    return repr(word)


def hang() -> str:
    """Never answers."""
    time.sleep(600)
    return "late"


def fall() -> str:
    """Raises."""
    raise ValueError("no such thing")


def die() -> str:
    """Ends its process."""
    os._exit(3)


def flood() -> str:
    """Answers with ten megabytes."""
    return "12 the " * 1_500_000


def scramble() -> str:
    """Answers with text that is not UTF-8."""
    return b"ab\xff\xfe".decode("utf-8", "surrogateescape")


def hoard() -> str:
    """Takes more memory than it may."""
    return "x" * (1 << 40)


def chatter() -> str:
    """Prints, and reads its input."""
    print("noise")
    return "quiet"
