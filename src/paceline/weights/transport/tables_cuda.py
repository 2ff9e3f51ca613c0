"""What the CUDA kernels over many tensor parts share: parts as matrices in memory, and tables of them on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

ROWS, COLUMNS = 8, 256
"""Elements that a program handles at a time"""

ALIGNMENT = 16
"""Bytes that a thread loads at once where addresses allow it"""

TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def as_matrix(values: torch.Tensor) -> torch.Tensor | None:
    """The tensor as rows of neighbouring elements, without a copy; None where it is none. A vector is one row."""
    matrix = values.flatten(1) if values.ndim > 1 else values.unsqueeze(0)
    same = matrix.data_ptr() == values.data_ptr() and (matrix.shape[1] == 1 or matrix.stride(1) == 1)
    return matrix if same else None


def is_aligned(matrices: Iterable[torch.Tensor]) -> bool:
    """Whether every row of every matrix begins at, and is as long as, a multiple of ALIGNMENT bytes."""
    return all(
        matrix.data_ptr() % ALIGNMENT == 0
        and matrix.stride(0) * matrix.dtype.itemsize % ALIGNMENT == 0
        and matrix.shape[1] * matrix.dtype.itemsize % ALIGNMENT == 0
        for matrix in matrices
    )


def upload(
    rows: Sequence[Sequence[int]], num_rows: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The table of parts, and one entry (part, first row) for every ROWS rows of a part; field `num_rows` counts them."""
    table = np.asarray(rows, dtype=np.int64)
    counts = -(-table[:, num_rows] // ROWS)
    which = np.repeat(np.arange(len(rows)), counts)
    begins = np.repeat(np.cumsum(counts) - counts, counts)
    tiles = np.stack([which, (np.arange(counts.sum()) - begins) * ROWS], axis=1).astype(np.int64)
    return torch.from_numpy(table).to(device), torch.from_numpy(tiles).to(device)
