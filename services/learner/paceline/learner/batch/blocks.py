"""Runs of sequences with equal length and prefix in a packed row, and the indices of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

Int64Array = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def on_device(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], device: torch.device) -> Tensor:
    """Begins to copy an array to a device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceBlock:
    """`num_sequences` neighbouring sequences of `length` tokens each, from token `start` on.

    They share a prefix, the `prefix_length` tokens from `prefix_start` on.
    """

    start: int
    num_sequences: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0

    @property
    def stop(self) -> int:
        """One past the last token."""
        return self.start + self.num_sequences * self.length

    def chunks(self, size: int) -> Iterator[SequenceBlock]:
        """Yields the parts of each sequence between multiples of `size`, counted from its prefix on.

        A part that begins within a chunk has the chunk's earlier tokens, the prefix's end, as its prefix.
        """
        for start in range(self.start, self.stop, self.length):
            position, end = self.prefix_length, self.prefix_length + self.length
            while position < end:
                seen = position % size
                length = min(size - seen, end - position)
                yield SequenceBlock(
                    start=start + position - self.prefix_length,
                    num_sequences=1,
                    length=length,
                    prefix_start=self.prefix_start + position - seen if seen else 0,
                    prefix_length=seen,
                )
                position += length


def merged_blocks(blocks: Sequence[SequenceBlock]) -> tuple[SequenceBlock, ...]:
    """Merges neighbours of equal length and prefix into one run."""
    merged = []
    for _, run in groupby(blocks, lambda block: (block.length, block.prefix_start, block.prefix_length)):
        first, *others = run
        count = first.num_sequences + sum(block.num_sequences for block in others)
        merged.append(replace(first, num_sequences=count))
    return tuple(merged)
