"""Runs of sequences with equal length and prefix in a packed row, and the indices of their tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Int64Array = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


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
