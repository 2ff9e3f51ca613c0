"""The temporary folder of a run's processes, removed with everything that killed processes have left there.

It is not below the run directory: sockets lie in it, and the path of a socket is limited to 107
characters.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

_MOST_CHARACTERS = 48
_SHORT = Path("/tmp")


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Makes a new folder in TMPDIR, or in /tmp if that path is too long; remove it after its users' end."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > _MOST_CHARACTERS and _SHORT.is_dir():
        parent = _SHORT
    return tempfile.TemporaryDirectory(prefix="paceline-", dir=parent, ignore_cleanup_errors=True)
