"""The temporary folder of a run's processes, removed with everything that killed processes have left there.

It is not below the run directory: sockets lie in it, and the path of a socket is limited to 107
characters.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

_MOST_CHARACTERS = 48
_SHORT = Path("/tmp")


class Scratch:
    """A new folder in TMPDIR, or in /tmp if that path is too long."""

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(str(parent)) > _MOST_CHARACTERS and _SHORT.is_dir():
            parent = _SHORT
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-", dir=parent, ignore_cleanup_errors=True)

    @property
    def env(self) -> Mapping[str, str]:
        """Environment variables that send a process's temporary files to the folder."""
        return {"TMPDIR": self._folder.name}

    def remove(self) -> None:
        """Removes the folder; its users must have ended."""
        self._folder.cleanup()
