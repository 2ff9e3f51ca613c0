"""The digest as one Triton kernel over all parts: reads every element once. Imported only where CUDA is.

A program takes ROWS rows of one part, walks along their columns with one 64-bit sum per lane, and adds its share to
the part's sum atomically. Integer addition modulo 2^64 does not depend on the order, so the result is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from paceline.reshard.digest import TensorDigester
from paceline.reshard.digest_job import DigestPart

_ROWS, _COLUMNS = 8, 256
_ALIGNMENT = 16


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sum_parts(  # type: ignore[no-untyped-def]
    parts,
    tiles,
    sums,
    SOURCE: tl.constexpr,
    WIRE: tl.constexpr,
    PATTERN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PER_VECTOR: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    part = parts + tl.load(tiles + 2 * tile) * 7
    first = tl.load(tiles + 2 * tile + 1)
    values = tl.load(part).to(tl.pointer_type(SOURCE))
    stride = tl.load(part + 1)
    num_rows = tl.load(part + 2)
    num_columns = tl.load(part + 3)
    row_factors = tl.load(part + 4).to(tl.pointer_type(tl.int64))
    column_factors = tl.load(part + 5).to(tl.pointer_type(tl.int64))
    output = tl.load(part + 6)
    if ALIGNED:
        # What lets the compiler load 16 bytes at a time.
        values = tl.multiple_of(values, 16)
        stride = tl.multiple_of(stride, PER_VECTOR)
        num_columns = tl.multiple_of(num_columns, PER_VECTOR)
    rows = first + tl.arange(0, ROWS)
    lanes = tl.zeros((ROWS, COLUMNS), dtype=tl.int64)
    for start in range(0, num_columns, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
        loaded = tl.load(values + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)
        bits = loaded.to(WIRE).to(PATTERN, bitcast=True).to(tl.int64)
        factors = tl.load(column_factors + columns, mask=columns < num_columns, other=0)
        lanes += bits * factors[None, :]
    by_row = tl.sum(lanes, axis=1) * tl.load(row_factors + rows, mask=rows < num_rows, other=0)
    tl.atomic_add(sums + output, tl.sum(by_row, axis=0))


_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_PATTERNS = {2: tl.int16, 4: tl.int32}


def fits(part: DigestPart) -> bool:
    """Whether the part is a matrix in memory: rows at one stride, the elements of a row side by side."""
    matrix = part.values.flatten(1) if part.values.ndim > 1 else part.values.unsqueeze(0)
    return matrix.data_ptr() == part.values.data_ptr() and (matrix.shape[1] == 1 or matrix.stride(1) == 1)


class DigestKernel:
    """Tables on the device that describe the parts, and the launches over them."""

    def __init__(self, digester: TensorDigester, parts: Sequence[DigestPart], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._tables: list[torch.Tensor] = []  # keeps alive what the addresses point to
        self._launches: list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]] = []
        grouped: dict[tuple[torch.dtype, bool], list[list[int]]] = {}
        for part in parts:
            row = self._describe(digester, part)
            per_vector = _ALIGNMENT // part.values.dtype.itemsize
            aligned = row[0] % _ALIGNMENT == 0 and row[1] % per_vector == 0 and row[3] % per_vector == 0
            grouped.setdefault((part.values.dtype, aligned), []).append(row)
        for (source, aligned), rows in grouped.items():
            table = np.asarray(rows, dtype=np.int64)
            counts = -(-table[:, 2] // _ROWS)
            which = np.repeat(np.arange(len(rows)), counts)
            begins = np.repeat(np.cumsum(counts) - counts, counts)
            tiles = np.stack([which, (np.arange(counts.sum()) - begins) * _ROWS], axis=1).astype(np.int64)
            options = {
                "SOURCE": _TRITON_TYPES[source],
                "WIRE": _TRITON_TYPES[dtype],
                "PATTERN": _PATTERNS[dtype.itemsize],
                "ALIGNED": aligned,
                "PER_VECTOR": _ALIGNMENT // source.itemsize,
            }
            device = digester.device
            self._launches.append(
                (options, torch.from_numpy(table).to(device), torch.from_numpy(tiles).to(device))
            )

    def launch(self, sums: torch.Tensor) -> None:
        """Adds every part's digest, without its name's factor, to its sum."""
        for options, table, tiles in self._launches:
            _sum_parts[(len(tiles),)](table, tiles, sums, ROWS=_ROWS, COLUMNS=_COLUMNS, **options)

    def _describe(self, digester: TensorDigester, part: DigestPart) -> list[int]:
        rows, columns = digester.factors(part.global_shape, part.box)
        self._tables += [rows, columns]
        if part.values.ndim == 1:
            # A vector is one row to the kernel, its row factors side by side.
            matrix, rows, columns = part.values.unsqueeze(0), columns, rows
        else:
            matrix = part.values.flatten(1)
        described = [matrix.data_ptr(), matrix.stride(0), *matrix.shape, rows.data_ptr(), columns.data_ptr()]
        return [*described, part.output]
