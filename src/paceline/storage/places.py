"""Locates a run's checkpoints, and marks their folder so that other hosts can recognise it."""

from __future__ import annotations

import secrets
import socket
import time
from pathlib import Path

from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError
from paceline.service.member.run_directory import read_run_id
from paceline.storage.folder import Folder, reason

_MARKER = ".paceline-run"
# A network file system may show another host's new file only after seconds.
_PATIENCE_S = 10.0
_PAUSE_S = 0.25


def checkpoints_of(config: RunConfig, run_dir: Path, run_id: str = "") -> Folder:
    """Returns the folder of a run's checkpoints.

    Args:
        run_id: the run's id; read from the run directory if it is not given.
    """
    if config.trainer.checkpoint_url is None:
        return Folder.at(run_dir / "checkpoints")
    return Folder.at(config.trainer.checkpoint_url).child(run_id or read_run_id(run_dir) or "unknown-run")


def mark(folder: Folder) -> str:
    """Writes a marker file into a folder, which is created if missing; returns the marker's text.

    An existing marker stays, because ranks of an earlier controller may look for it.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        folder.make()
        text = folder.read(_MARKER).decode(errors="replace") if folder.has(_MARKER) else ""
        text = text or secrets.token_hex(8)
        folder.write(_MARKER, text)
    except OSError as error:
        raise ConfigError(
            f"the checkpoint folder {folder} cannot be written ({reason(error)}); fix its permissions or "
            "credentials, or set trainer.checkpoint_url"
        ) from error
    return text


def require_marker(folder: Folder, text: str, *, who: str) -> None:
    """Checks that this process sees the folder that the controller marked with `text`, and may write there.

    Raises:
        ConfigError: it sees another folder, or may not write.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while fault := _fault_of_marker(folder, text):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{who} on {socket.gethostname()} does not find the controller's marker in {folder}: {fault}"
                ". They see different folders under this path. Mount the same storage for the controller and "
                "every "
                "learner rank, or set trainer.checkpoint_url to a URL or path that all of them reach"
            )
        time.sleep(_PAUSE_S)
    probe = f"{_MARKER}-{secrets.token_hex(4)}"
    try:
        folder.write(probe, "")
        folder.remove(probe)
    except OSError as error:
        raise ConfigError(
            f"{who} on {socket.gethostname()} sees the checkpoint folder {folder} but cannot write there "
            f"({reason(error)}); fix its permissions or credentials"
        ) from error


def _fault_of_marker(folder: Folder, expected: str) -> str:
    """Returns why the marker is not the controller's; "" if it is."""
    try:
        text = folder.read(_MARKER).decode(errors="replace")
    except OSError as error:
        return reason(error)
    return "" if text == expected else "there is another marker"
