"""Writes log records as lines to standard error, each with the service's name."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

from paceline.service.output import write_whole_lines


class LineFormatter(logging.Formatter):
    """Formats `2026-01-31T12:00:00.123Z INFO rollout-0 paceline.rollout.app: message`, then a traceback."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03dZ %(levelname)s {name} %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
        )
        self.converter = time.gmtime


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes records as lines; drops them if the disk is full or the terminal closed."""

    def __init__(self, name: str, stream: TextIO) -> None:
        super().__init__(stream)
        self.setFormatter(LineFormatter(name))

    def handleError(self, record: logging.LogRecord) -> None:
        """Prints a traceback, as the base class does, unless the record could not be written."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def setup_logging(name: str, level: str = "INFO") -> None:
    """Sends this process's records to standard error, in whole lines, and replaces earlier handlers."""
    write_whole_lines()
    logging.basicConfig(handlers=[LineHandler(name, sys.stderr)], force=True)
    set_level(level)


def set_level(level: str) -> None:
    """Sets the level of Paceline's records; libraries stay at WARNING unless it is DEBUG."""
    logging.getLogger("paceline").setLevel(level)
    logging.getLogger().setLevel("DEBUG" if level == "DEBUG" else "WARNING")
