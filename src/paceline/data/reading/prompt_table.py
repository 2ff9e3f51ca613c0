"""Caches the tokens of a set of prompts on this machine, with facts about all rows.

CACHE/prompts/KEY.arrow    KEY is the digest of everything that determines the tokens; read memory-mapped
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from paceline.core.errors import DataError
from paceline.core.samples.trajectory import Int32Array
from paceline.storage.cache import cache_dir

log = logging.getLogger(__name__)

KEPT_FROM = 5000
"""Minimum number of rows of a cached table."""

_MOST_BYTES = 8 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedRow:
    """The data of a row that a table keeps.

    Attributes:
        is_text: whether its prompt is plain text, not messages.
        source: its data source; "" without one.
        order: its value in the column of data.order_by; None without one.
        scored_by: the data for its scorers as text, for the digest.
    """

    token_ids: Sequence[int]
    is_text: bool
    source: str
    order: str | float | None
    scored_by: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptTable:
    """All rows of a set, in order.

    Attributes:
        tokens: tokens of all rows, one after the other.
        ends: where each row's tokens end.
        is_text: whether each row is plain text.
        sources: the distinct data sources, sorted.
        source: each row's index in `sources`.
        ranks: rank of each row's value among the distinct values; None without data.order_by.
        digest: digest of the tokens and of the data that the rows' scorers need.
    """

    tokens: Int32Array
    ends: npt.NDArray[np.int64]
    is_text: npt.NDArray[np.bool_]
    sources: tuple[str, ...]
    source: Int32Array
    ranks: Int32Array | None
    digest: str

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The number of tokens of each row."""
        return np.diff(self.ends, prepend=0)

    def token_ids(self, row: int) -> Int32Array:
        """Returns the tokens of a row."""
        return self.tokens[self.ends[row - 1] if row else 0 : self.ends[row]]

    @classmethod
    def of(cls, rows: Iterable[TokenizedRow]) -> Self:
        """Makes a table of a set's rows, given in order.

        Raises:
            DataError: values of data.order_by have no common order.
        """
        digest = hashlib.blake2b(digest_size=16)
        parts: list[Int32Array] = []
        lengths, is_text, sources, orders = list[int](), list[bool](), list[str](), list[Any]()
        for row in rows:
            token_ids = np.asarray(row.token_ids, dtype=np.int32)
            digest.update(f"{len(parts)}\n{row.scored_by}\n".encode(errors="backslashreplace"))
            digest.update(token_ids.tobytes())
            parts.append(token_ids)
            lengths.append(len(token_ids))
            is_text.append(row.is_text)
            sources.append(row.source)
            orders.append(row.order)
        names, places = ranked(sources)
        ranks = None if None in orders else ranked(orders)[1]
        if ranks is not None:
            digest.update(ranks.tobytes())
        return cls(
            tokens=np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32),
            ends=np.cumsum(lengths, dtype=np.int64),
            is_text=np.asarray(is_text, dtype=np.bool_),
            sources=tuple(names),
            source=places,
            ranks=ranks,
            digest=digest.hexdigest(),
        )

    def save(self, file: Path) -> None:
        """Writes the table atomically; raises OSError on failure."""
        import pyarrow

        offsets = np.concatenate([np.zeros(1, dtype=np.int64), self.ends])
        columns = {
            "tokens": pyarrow.LargeListArray.from_arrays(offsets, pyarrow.array(self.tokens)),
            "is_text": pyarrow.array(self.is_text),
            "source": pyarrow.DictionaryArray.from_arrays(self.source, list(self.sources)),
        }
        if self.ranks is not None:
            columns["rank"] = pyarrow.array(self.ranks)
        batch = pyarrow.RecordBatch.from_pydict(columns, metadata={"digest": self.digest})
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        with pyarrow.OSFile(str(partial), "wb") as sink, pyarrow.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        partial.replace(file)

    @classmethod
    def load(cls, file: Path) -> Self:
        """Maps a table that `save` wrote; raises OSError or ValueError if there is none."""
        import pyarrow

        batch: Any = pyarrow.ipc.open_file(pyarrow.memory_map(str(file))).get_batch(0)
        tokens, source = batch.column("tokens"), batch.column("source")
        return cls(
            tokens=tokens.values.to_numpy(),
            ends=tokens.offsets.to_numpy()[1:],
            is_text=batch.column("is_text").to_numpy(zero_copy_only=False),
            sources=tuple(source.dictionary.to_pylist()),
            source=source.indices.to_numpy(),
            ranks=batch.column("rank").to_numpy() if "rank" in batch.schema.names else None,
            digest=batch.schema.metadata[b"digest"].decode(),
        )


def kept_table(key: str) -> PromptTable | None:
    """Returns the table cached under a key; None if there is none or it cannot be read."""
    file = _file(key)
    try:
        table = PromptTable.load(file)
        os.utime(file)
    except (OSError, ValueError, KeyError):
        return None
    return table


def keep_table(key: str, table: PromptTable) -> None:
    """Caches a table and removes the least recently used ones if needed; does nothing if the disk is full."""
    file = _file(key)
    try:
        table.save(file)
        for outdated in _outdated(file.parent):
            outdated.unlink(missing_ok=True)
    except OSError as error:
        log.warning("tokenized prompts are not kept in %s: %s", file.parent, error)


def _file(key: str) -> Path:
    return cache_dir() / "prompts" / f"{key}.arrow"


def _outdated(folder: Path) -> Iterator[Path]:
    total = 0
    by_use = sorted(folder.glob("*.arrow"), key=lambda file: -file.stat().st_mtime)
    for place, file in enumerate(by_use):
        total += file.stat().st_size
        if place and total > _MOST_BYTES:
            yield file


def ranked(values: Sequence[Any]) -> tuple[list[Any], Int32Array]:
    """Returns the distinct values in order, and the rank of each value among them."""
    try:
        distinct = sorted(set(values))
    except TypeError:
        raise DataError(
            "the column of data.order_by has numbers and strings, which have no common order; write either"
        ) from None
    places = {value: place for place, value in enumerate(distinct)}
    return distinct, np.asarray([places[value] for value in values], dtype=np.int32)
