"""Makes processes die with their parent, adopts orphans and writes files atomically, on Linux."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

DIE_WITH_PARENT = "PACELINE_DIE_WITH_PARENT"
PARENT_PID = "PACELINE_PARENT_PID"
STARTED_AS = "PACELINE_STARTED_AS"
"""Environment variable in which the launcher sets a member's incarnation."""
BROKER_URL = "PACELINE_BROKER_URL"
BLOB_STORES = "PACELINE_BLOB_STORES"
"""Environment variable with the addresses of the blob stores, separated by spaces."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Makes SIGTERM end this process when its parent ends, if PACELINE_DIE_WITH_PARENT is 1."""
    if os.environ.get(DIE_WITH_PARENT) != "1":
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # Removed, because this process's own children must not inherit it.
    expected = os.environ.pop(PARENT_PID, None)
    if expected and int(expected) != os.getppid():
        raise SystemExit("the launcher ended before this process had started")


def die_with(parent: int, number: signal.Signals) -> None:
    """Makes the kernel send the signal to this process when its parent, `parent`, ends."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants' orphans, so that it can end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def write_atomically(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Writes a file by renaming a complete one: readers never see part of the text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")
