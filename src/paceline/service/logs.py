"""One line a record, with the service's name, on standard error."""

from __future__ import annotations

import logging
import sys
import time


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO rollout-0 paceline.rollout.app: message`; a traceback follows on its own lines."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03dZ %(levelname)s {name} %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
        )
        self.converter = time.gmtime


def setup_logging(name: str, level: str = "INFO") -> None:
    """Sends this process's records to standard error; replaces handlers that were there."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(name))
    logging.basicConfig(handlers=[handler], force=True)
    set_level(level)


def set_level(level: str) -> None:
    """Sets the level of our own records; libraries stay at WARNING unless ours is DEBUG."""
    logging.getLogger("paceline").setLevel(level)
    logging.getLogger().setLevel("DEBUG" if level == "DEBUG" else "WARNING")
