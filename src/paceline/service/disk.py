"""The message about a full disk, for the process that it stops and for explanations of a run's end."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from paceline.core.errors import EnvironmentLackError

DISK_IS_FULL = "is full ("
"""These words are in every message about a full disk"""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LEAST_BYTES = 1 << 20


def full_disk(folder: Path) -> str:
    """Returns the message if the disk of a folder is almost full; else ""."""
    free = shutil.disk_usage(folder).free
    return _sentence(folder, free) if free < _LEAST_BYTES else ""


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Wraps a block that writes files in a folder.

    Raises:
        EnvironmentLackError: the disk, or the user's quota of it, is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise EnvironmentLackError(_sentence(folder, shutil.disk_usage(folder).free)) from None


def _sentence(folder: Path, free: int) -> str:
    return (
        f"the disk of {folder} {DISK_IS_FULL}{free} bytes are free): make room there, and the same command "
        "goes on with the run"
    )
