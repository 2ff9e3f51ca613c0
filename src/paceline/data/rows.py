"""Reads rows from parquet and JSONL files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, overload

from paceline.core.errors import DataError

Row = dict[str, Any]


def value_at(row: Row, column: str) -> Any:
    """Returns a column's value; `a.b` is the field b of column a, unless there is a column `a.b`.

    None if the row has no such value.
    """
    if column in row:
        return row[column]
    head, dot, rest = column.partition(".")
    inner = row.get(head)
    return value_at(inner, rest) if dot and isinstance(inner, dict) else None


class StoredRows(Sequence[tuple[Row, Path]]):
    """The rows of files, each with the folder of its file; decoded on request.

    Args:
        files: parquet and JSONL; the suffix decides the format.
        required: columns that each file, or each decoded line of JSONL, must have.

    Raises:
        DataError: a file is missing, unreadable, of an unknown kind or without a required column, or all are
            empty. Decoding raises it, too.
    """

    def __init__(self, files: Sequence[str | Path], required: Iterable[str] = ()) -> None:
        wanted = tuple(required)
        self._files = [(_opened(Path(file), wanted), Path(file).parent) for file in files]
        self._ends = list(accumulate(len(rows) for rows, _ in self._files))
        if not len(self):
            raise DataError(
                f"no rows in {', '.join(map(str, files)) or 'an empty list of files'}; "
                "give a file with at least one row"
            )

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, place: int) -> tuple[Row, Path]: ...
    @overload
    def __getitem__(self, place: slice) -> list[tuple[Row, Path]]: ...
    def __getitem__(self, place: int | slice) -> tuple[Row, Path] | list[tuple[Row, Path]]:
        if isinstance(place, int):
            return self._between(place, place + 1)[0]
        start, end, _ = place.indices(len(self))
        return self._between(start, end)

    def _between(self, start: int, end: int) -> list[tuple[Row, Path]]:
        rows: list[tuple[Row, Path]] = []
        for (file, folder), after in zip(self._files, self._ends, strict=True):
            before = after - len(file)
            if start < after and end > before:
                part = file.decoded(max(start, before) - before, min(end, after) - before)
                rows += [(row, folder) for row in part]
        return rows


def read_rows(files: Sequence[str | Path], required: Iterable[str] = ()) -> list[Row]:
    """Reads all rows of `files`, in order; raises the same errors as `StoredRows`."""
    return [row for row, _ in StoredRows(files, required)[:]]


def first_row(file: str | Path) -> Row:
    """Returns the first row of a file; {} if it is empty. Raises the same errors as `first_rows`."""
    return next(iter(first_rows(file, 1)), {})


def first_rows(file: str | Path, at_most: int) -> list[Row]:
    """Returns the first rows of a file, without reading the others.

    Raises:
        DataError: the file is unreadable.
    """
    path = Path(file)
    if not _is_parquet(path):
        with path.open("rb") as lines:
            rows = (_object(path, n, line) for n, line in enumerate(lines, start=1) if line.strip())
            return list(islice(rows, at_most))
    with _reading(path) as parquet:
        batches = parquet.ParquetFile(path).iter_batches(batch_size=at_most)
        return next((batch.to_pylist() for batch in batches), [])


def count_rows(files: Sequence[str | Path], at_most: int) -> int:
    """Counts the rows of files, up to `at_most`.

    Raises:
        DataError: a file is unreadable.
    """
    count = 0
    for path in map(Path, files):
        if count >= at_most:
            break
        if _is_parquet(path):
            with _reading(path) as parquet:
                count += int(parquet.read_metadata(path).num_rows)
        else:
            with path.open("rb") as lines:
                count += sum(1 for _ in islice(filter(bytes.strip, lines), at_most - count))
    return min(count, at_most)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """Yields pyarrow's module for parquet; turns its errors about a file into DataError."""
    import pyarrow
    import pyarrow.parquet

    try:
        yield pyarrow.parquet
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"data file {path} is not readable as parquet: {error}") from error


def _is_parquet(path: Path) -> bool:
    """Returns whether a file is parquet rather than JSONL, by its suffix."""
    if not path.is_file():
        raise DataError(f"data file {path} does not exist; correct the path, or make the file first")
    if path.suffix not in (".parquet", ".jsonl", ".ndjson"):
        raise DataError(
            f"data file {path}: cannot tell the format from {path.suffix!r}; use .parquet or .jsonl"
        )
    return path.suffix == ".parquet"


def _opened(path: Path, required: tuple[str, ...]) -> _Parquet | _Lines:
    return _Parquet(path, required) if _is_parquet(path) else _Lines(path, required)


class _Parquet:
    def __init__(self, path: Path, required: tuple[str, ...]) -> None:
        self._path = path
        with _reading(path) as parquet:
            self._table = parquet.read_table(path)
        _require(path, required, _columns(self._table.schema))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def decoded(self, start: int, end: int) -> list[Row]:
        import pyarrow

        try:
            rows: list[Row] = self._table.slice(start, end - start).to_pylist()
        except pyarrow.ArrowException as error:
            raise DataError(f"data file {self._path} is not readable as parquet: {error}") from error
        except (ValueError, OverflowError) as error:  # A date that Python has no form for, text not in UTF-8.
            raise DataError(f"data file {self._path} holds a value that cannot be read: {error}") from error
        return rows


def _object(path: Path, number: int, line: bytes) -> Row:
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {number}, is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number}, holds a {type(row).__name__}; every line must be an object")
    return row


class _Lines:
    def __init__(self, path: Path, required: tuple[str, ...]) -> None:
        self._path, self._required = path, required
        with path.open("rb") as lines:
            self._lines = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]

    def __len__(self) -> int:
        return len(self._lines)

    def decoded(self, start: int, end: int) -> list[Row]:
        rows: list[Row] = []
        for number, line in self._lines[start:end]:
            row = _object(self._path, number, line)
            _require(f"{self._path}, line {number},", self._required, _keys(row))
            rows.append(row)
        return rows


def _columns(fields: Iterable[Any], prefix: str = "") -> list[str]:
    """Returns the names of pyarrow fields and, dotted, of nested fields."""
    import pyarrow

    names = []
    for field in fields:
        names.append(prefix + field.name)
        if pyarrow.types.is_struct(field.type):
            names += _columns(field.type, f"{prefix}{field.name}.")
    return names


def _keys(tree: Row, prefix: str = "") -> list[str]:
    names = []
    for key, value in tree.items():
        names.append(prefix + key)
        if isinstance(value, dict):
            names += _keys(value, f"{prefix}{key}.")
    return names


def _require(where: Path | str, required: tuple[str, ...], present: Iterable[str]) -> None:
    present = list(present)
    for column in required:
        if column not in present:
            raise DataError(
                f"{where} has no column {column!r}; it has {', '.join(present)}: "
                "name the right one under data.*_key"
            )
