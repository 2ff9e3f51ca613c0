"""Reads JSONL files that may still grow, line by line: all of them, or what is new since the last look."""

from __future__ import annotations

import contextlib
import json
import os
from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

_VALIDATION = b'"val/'
_NUM_AT_ENDS = 50
_PORTION_BYTES = 2**20


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Reads the objects of a JSONL file one by one; a missing file has none, a torn last line is left out."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            if (value := _object(line)) is not None:
                yield value


def last_lines(path: Path, num_bytes: int) -> bytes:
    """Reads the complete lines among a file's last `num_bytes` bytes; a missing file has none."""
    try:
        with path.open("rb") as file:
            start = max(0, os.fstat(file.fileno()).st_size - num_bytes)
            file.seek(start)
            end = file.read(num_bytes)
    except OSError:
        return b""
    first = end.find(b"\n") + 1 if start else 0
    return end[first : end.rfind(b"\n") + 1]


class GrowingFile:
    """A JSONL file that another process appends to.

    Attributes:
        generation: counts how often the file began anew: it was replaced or cut.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._offset = path, 0, 0
        self.generation = 0

    def new(self, *, at_most: int | None = None) -> Iterator[dict[str, Any]]:
        """Reads the complete lines since the last call, or all of them when the file has begun anew.

        Args:
            at_most: read at most this many evenly spaced lines, as many lines with validations, and the first
                and last ones. Parsing every line of a long run takes a minute.
        """
        try:
            with self._path.open("rb") as file:
                self._rewind_if_other(file.fileno())
                start = self._offset
                count, wanted = (None, None) if at_most is None else _thinned(_lines(file, start), at_most)
                for number, line in enumerate(islice(_lines(file, start), count)):
                    self._offset += len(line)
                    if (wanted is None or number in wanted) and (value := _object(line)) is not None:
                        yield value
        except OSError:
            return

    def new_portions(self) -> Iterator[bytes]:
        """Reads as `new` does; yields bytes of many complete lines."""
        try:
            with self._path.open("rb") as file:
                self._rewind_if_other(file.fileno())
                file.seek(self._offset)
                while portion := file.read(_PORTION_BYTES) + file.readline():
                    complete = portion if portion.endswith(b"\n") else portion[: portion.rfind(b"\n") + 1]
                    self._offset += len(complete)
                    if complete:
                        yield complete
        except OSError:
            return

    def _rewind_if_other(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode, self._offset = status.st_ino, 0
            self.generation += 1


def _object(line: bytes) -> dict[str, Any] | None:
    """Returns the object in a line; None if the line holds none."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _lines(file: BinaryIO, start: int) -> Iterator[bytes]:
    file.seek(start)
    return (line for line in file if line.endswith(b"\n"))


def _thinned(lines: Iterable[bytes], at_most: int) -> tuple[int, Container[int] | None]:
    """Returns the number of lines, and which of them to read; None stands for all."""
    count, validations = 0, array("q")
    for count, line in enumerate(lines, 1):
        if _VALIDATION in line:
            validations.append(count - 1)
    if count <= at_most:
        return count, None
    ends = {*range(_NUM_AT_ENDS), *range(count - _NUM_AT_ENDS, count)}
    some = (validations[i] for i in evenly(0, len(validations), at_most))
    return count, {*ends, *evenly(0, count, at_most), *some}


def evenly(start: int, stop: int, limit: int) -> Sequence[int]:
    """Picks at most `limit` numbers from `start` to `stop`, evenly apart, with the first and the last."""
    count = stop - start
    if count <= limit:
        return range(start, stop)
    return [start + round(i * (count - 1) / (limit - 1)) for i in range(limit)]
