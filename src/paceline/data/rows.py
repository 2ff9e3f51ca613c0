"""Reads rows from parquet and JSONL files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.core.errors import DataError

Row = dict[str, Any]


def value_at(row: Row, column: str) -> Any:
    """The value of a column; `a.b` leads to the field b of column a, unless a column has that very name.

    None where the row has no such value.
    """
    if column in row:
        return row[column]
    head, dot, rest = column.partition(".")
    inner = row.get(head)
    return value_at(inner, rest) if dot and isinstance(inner, dict) else None


def read_rows(files: Sequence[str | Path], required: Iterable[str] = ()) -> list[Row]:
    """Reads all rows of `files`, in order; the suffix decides the format.

    Raises:
        DataError: a file is missing, unreadable, of an unknown kind or without a column of `required`, or all
            are empty.
    """
    return [row for row, _ in rows_with_folders(files, required)]


def rows_with_folders(files: Sequence[str | Path], required: Iterable[str] = ()) -> list[tuple[Row, Path]]:
    """Reads as `read_rows` does; each row with the folder of its file."""
    wanted = tuple(required)
    rows = [(row, Path(file).parent) for file in files for row in _read_file(Path(file), wanted)]
    if not rows:
        raise DataError(
            f"no rows in {', '.join(map(str, files)) or 'an empty list of files'}; "
            "give a file with at least one row"
        )
    return rows


def first_row(file: str | Path) -> Row:
    """The first row of a file; {} where there is none. Raises what `first_rows` raises."""
    return next(iter(first_rows(file, 1)), {})


def first_rows(file: str | Path, at_most: int) -> list[Row]:
    """The first rows of a file, without reading the others.

    Raises:
        DataError: the file is unreadable.
    """
    path = Path(file)
    if not _is_parquet(path):
        with path.open("rb") as lines:
            rows = (_object(path, n, line) for n, line in enumerate(lines, start=1) if line.strip())
            return list(islice(rows, at_most))
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=at_most)
        return next((batch.to_pylist() for batch in batches), [])
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"data file {path} is not readable as parquet: {error}") from error


def count_rows(files: Sequence[str | Path], at_most: int) -> int:
    """How many rows the files have, counted up to `at_most`.

    Raises:
        DataError: a file is unreadable.
    """
    count = 0
    for path in map(Path, files):
        if count >= at_most:
            break
        if _is_parquet(path):
            count += _num_parquet_rows(path)
        else:
            with path.open("rb") as lines:
                count += sum(1 for _ in islice(filter(bytes.strip, lines), at_most - count))
    return min(count, at_most)


def _num_parquet_rows(path: Path) -> int:
    import pyarrow
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(path).num_rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"data file {path} is not readable as parquet: {error}") from error


def _read_file(path: Path, required: tuple[str, ...]) -> list[Row]:
    return _read_parquet(path, required) if _is_parquet(path) else _read_jsonl(path, required)


def _is_parquet(path: Path) -> bool:
    """Whether a file is parquet rather than JSONL, by its suffix."""
    if not path.is_file():
        raise DataError(f"data file {path} does not exist; correct the path, or make the file first")
    if path.suffix not in (".parquet", ".jsonl", ".ndjson"):
        raise DataError(
            f"data file {path}: cannot tell the format from {path.suffix!r}; use .parquet or .jsonl"
        )
    return path.suffix == ".parquet"


def _read_parquet(path: Path, required: tuple[str, ...]) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
        _require(path, required, _columns(table.schema))
        rows: list[Row] = table.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"data file {path} is not readable as parquet: {error}") from error
    except (ValueError, OverflowError) as error:  # a date that Python has no form for, text that is not UTF-8
        if isinstance(error, DataError):
            raise
        raise DataError(f"data file {path} holds a value that cannot be read: {error}") from error
    return rows


def _object(path: Path, number: int, line: bytes) -> Row:
    """Reads a line of JSONL as a row."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {number}, is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number}, holds a {type(row).__name__}; every line must be an object")
    return row


def _read_jsonl(path: Path, required: tuple[str, ...]) -> list[Row]:
    rows: list[Row] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row = _object(path, number, line)
            _require(f"{path}, line {number},", required, _keys(row))
            rows.append(row)
    return rows


def _columns(fields: Iterable[Any], prefix: str = "") -> list[str]:
    """The names of pyarrow fields and, dotted, of what is nested in them."""
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
