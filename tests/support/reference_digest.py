"""The digest of `weights.digest.definition`, in numpy: the reference for the other implementations."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.weights.digest.definition import MASK, column_factors, name_factor, row_factors
from paceline.weights.geometry.boxes import Box


def digest_array(name: str, global_shape: tuple[int, ...], box: Box, values: npt.NDArray[Any]) -> int:
    """The reference: the digest of the elements of `box`.

    Args:
        values: the elements, in the box's shape, of a type of 2 or 4 bytes; bfloat16, which numpy lacks, is
            given as its int16 patterns.
    """
    if values.shape != box.shape:
        raise ValueError(f"{name}: values of shape {values.shape} for a box of shape {box.shape}")
    bits = np.ascontiguousarray(values).view(np.dtype(f"i{values.dtype.itemsize}")).astype(np.int64)
    rows = bits.view(np.uint64).reshape(box.shape[0], -1)
    sums = (rows * column_factors(global_shape, box)).sum(axis=1, dtype=np.uint64)
    total = (sums * row_factors(box.start[0], box.stop[0])).sum(dtype=np.uint64)
    return int(total) * name_factor(name) & MASK
