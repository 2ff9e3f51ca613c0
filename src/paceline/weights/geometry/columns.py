"""Columns of integers: a plan of hundreds of thousands of pieces has no object per piece."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def padded(rows: Sequence[Sequence[int]], dims: int, fill: int = 0) -> IntArray:
    """Returns index tuples as a table, (rows, dims) int64; shorter ones end with `fill`.

    A box that is padded with starts of 0 and stops of 1 has the same elements in the same order.
    """
    table = np.full((len(rows), dims), fill, dtype=np.int64)
    for dim, column in enumerate(zip_longest(*rows, fillvalue=fill)):
        table[:, dim] = column
    return table


def ranges(first: IntArray, count: IntArray) -> tuple[IntArray, IntArray]:
    """Returns the numbers of all ranges [first, first + count), each with the index of its range."""
    owner = np.repeat(np.arange(len(first)), count)
    return owner, np.arange(len(owner)) + np.repeat(first - np.cumsum(count) + count, count)
