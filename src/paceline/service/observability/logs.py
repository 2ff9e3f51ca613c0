"""Log records as lines on standard error, each with the service's name."""

from __future__ import annotations

import logging
import sys
import time


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO rollout-0 paceline.rollout.app: message`, then the traceback if any."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03dZ %(levelname)s {name} %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
        )
        self.converter = time.gmtime


def setup_logging(name: str, level: str = "INFO") -> None:
    """Sends this process's records to standard error, instead of to earlier handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(name))
    logging.basicConfig(handlers=[handler], force=True)
    set_level(level)


def set_level(level: str) -> None:
    """Sets the level of Paceline's records; libraries stay at WARNING unless it is DEBUG."""
    logging.getLogger("paceline").setLevel(level)
    logging.getLogger().setLevel("DEBUG" if level == "DEBUG" else "WARNING")
