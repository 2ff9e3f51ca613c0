"""The sequences of a packed row in a few padded batches, with one call of attention for each batch.

A call costs as much as the arithmetic of dozens of short sequences, and neighbours rarely have the same
length. So short lengths are rounded up, and sequences of the same rounded size form a batch. A prefix ends
where the sequence's own keys begin, and no query sees the free places before it. Free places at the end of a
sequence are seen only by queries whose results are not used:

    keys      . . P P P | S S S .          queries   S S S .

All tokens are gathered by index at once, because a slice per sequence would create a gradient as large as the
whole row for each sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from paceline.learner.batch.blocks import Int64Array, SequenceBlock, on_device

SHORT: Final = 256
"""Most keys of a padded sequence with its prefix; a longer one gets a call of its own."""
STEP: Final = 16
"""Short lengths are rounded up to a multiple of this."""
MOST_SCORES: Final = 1 << 20
"""Most queries times keys of a batch, per head: an attention that stores all scores needs 4 MiB for them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PaddedBatch:
    """Sequences that are padded to the same size.

    Attributes:
        num_sequences: N.
        num_queries: L, places of a sequence.
        num_keys: K, places of a sequence together with its prefix.
        mask: (L, K) or (N, 1, L, K) bool, True where a query sees a key; None without prefixes, when each
            token sees itself and all before it.
    """

    num_sequences: int
    num_queries: int
    num_keys: int
    mask: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PaddedSequences:
    """All sequences of a packed row.

    Attributes:
        queries: (sum of N L,) int64, the token in each place of all batches; free places hold some other
            token of the sequence.
        keys: (sum of N K,) int64, the token in each place of all keys, those of prefixes included.
        order: (T,) int64, the place of each token among `queries`.
    """

    batches: tuple[PaddedBatch, ...]
    queries: Tensor
    keys: Tensor
    order: Tensor

    @classmethod
    def of(cls, blocks: Sequence[SequenceBlock], device: torch.device) -> PaddedSequences:
        """Pads the sequences of all runs of equal length and prefix."""
        order = np.empty(max(block.stop for block in blocks), np.int64)
        causal: dict[tuple[int, int], Tensor] = {}
        batches, all_queries, all_keys, place = [], [], [], 0
        for (prefix_size, size), rows in _parts(blocks):
            starts, lengths = rows[:, 0:1], rows[:, 1:2]
            steps = np.arange(size)
            inside = steps < lengths
            queries = starts + np.minimum(steps, lengths - 1)
            order[queries[inside]] = place + np.flatnonzero(inside)
            place += queries.size
            keys, seen = _with_prefixes(queries, rows, prefix_size)
            all_queries.append(queries.reshape(-1))
            all_keys.append(keys.reshape(-1))
            shape, mask = (size, prefix_size + size), None
            if prefix_size:
                if shape not in causal:
                    causal[shape] = causal_mask(*shape, None, device)
                mask = causal[shape]
                if not seen.all():
                    mask = mask & on_device(seen[:, None, None, :], device)
            batches.append(
                PaddedBatch(num_sequences=len(rows), num_queries=shape[0], num_keys=shape[1], mask=mask)
            )
        return cls(
            batches=tuple(batches),
            queries=on_device(np.concatenate(all_queries), device),
            keys=on_device(np.concatenate(all_keys), device),
            order=on_device(order, device),
        )


def causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Returns (queries, keys), True where a query sees a key; the last query and last key are one token."""
    place = torch.arange(num_keys, device=device)
    distance = place[num_keys - num_queries :].unsqueeze(1) - place
    return (distance >= 0) & (distance < (num_keys if window is None else window))


def _parts(blocks: Sequence[SequenceBlock]) -> Iterator[tuple[tuple[int, int], Int64Array]]:
    """Yields batches: the size of the prefix, that of the sequence, and the batch's rows, (N, 4).

    A row holds the start and length of a sequence, then those of its prefix.
    """
    sizes: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for block in blocks:
        sizes.setdefault(_size(block), []).extend(
            (start, block.length, block.prefix_start, block.prefix_length)
            for start in range(block.start, block.stop, block.length)
        )
    for (prefix_size, size), rows in sizes.items():
        most = max(1, MOST_SCORES // (size * (prefix_size + size)))
        for first in range(0, len(rows), most):
            yield (prefix_size, size), np.array(rows[first : first + most], np.int64)


def _size(block: SequenceBlock) -> tuple[int, int]:
    if block.prefix_length + block.length > SHORT:
        return block.prefix_length, block.length
    return _rounded(block.prefix_length), _rounded(block.length)


def _with_prefixes(
    queries: Int64Array, rows: Int64Array, prefix_size: int
) -> tuple[Int64Array, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]:
    """Returns the tokens of keys, (N, K), and which of them are seen."""
    prefix_starts, prefix_lengths = rows[:, 2:3], rows[:, 3:4]
    place = np.arange(prefix_size) - (prefix_size - prefix_lengths)  # (N, P), negative in free places
    keys = np.concatenate([prefix_starts + np.maximum(place, 0), queries], axis=1)
    return keys, np.concatenate([place >= 0, np.ones(queries.shape, bool)], axis=1)


def _rounded(length: int) -> int:
    return -(-length // STEP) * STEP
