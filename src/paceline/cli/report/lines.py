"""Reads JSONL files that may still grow: whole, or what is new since the last look."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, [] if it is missing; skips a last line that was cut off in writing."""
    try:
        return _objects(path.read_bytes())
    except OSError:
        return []


class GrowingFile:
    """A JSONL file that another process appends to.

    Attributes:
        generation: counts how often the file began anew: it was replaced or cut.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._offset = path, 0, 0
        self.generation = 0

    def new(self) -> list[dict[str, Any]]:
        """The complete lines since the last call, or all of them when the file has begun anew."""
        try:
            with self._path.open("rb") as file:
                self._rewind_if_other(file.fileno())
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return _objects(data[:end])

    def _rewind_if_other(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode, self._offset = status.st_ino, 0
            self.generation += 1


def _objects(data: bytes) -> list[dict[str, Any]]:
    values = []
    for line in data.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            values.append(value)
    return values
