"""The digest as one Triton kernel over all parts: reads every element once. Imported only where CUDA is.

A program takes ROWS rows of one part, walks along their columns with one 64-bit sum per lane, and adds its share to
the part's sum atomically. Integer addition modulo 2^64 does not depend on the order, so the result is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from paceline.weights.digest.definition import TensorDigester
from paceline.weights.digest.job import DigestPart
from paceline.weights.transport.tables_cuda import (
    ALIGNMENT,
    COLUMNS,
    ROWS,
    TRITON_TYPES,
    as_matrix,
    is_aligned,
    upload,
)


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


_PATTERNS = {2: tl.int16, 4: tl.int32}


def fits(part: DigestPart) -> bool:
    """Whether the part is a matrix in memory: rows at one stride, the elements of a row side by side."""
    return as_matrix(part.values) is not None


class DigestKernel:
    """Tables on the device that describe the parts, and the launches over them."""

    def __init__(self, digester: TensorDigester, parts: Sequence[DigestPart], dtype: torch.dtype) -> None:
        self._tables: list[torch.Tensor] = []  # keeps alive what the addresses point to
        self._launches: list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]] = []
        grouped: dict[tuple[torch.dtype, bool], list[list[int]]] = {}
        for part in parts:
            matrix = as_matrix(part.values)
            assert matrix is not None
            rows, columns = digester.factors(part.global_shape, part.box)
            self._tables += [rows, columns]
            if part.values.ndim == 1:
                # A vector is one row, its row factors side by side.
                rows, columns = columns, rows
            row = [matrix.data_ptr(), matrix.stride(0), *matrix.shape, rows.data_ptr(), columns.data_ptr()]
            grouped.setdefault((matrix.dtype, is_aligned([matrix])), []).append([*row, part.output])
        for (source, aligned), table in grouped.items():
            options = {
                "SOURCE": TRITON_TYPES[source],
                "WIRE": TRITON_TYPES[dtype],
                "PATTERN": _PATTERNS[dtype.itemsize],
                "ROWS": ROWS,
                "COLUMNS": COLUMNS,
                "ALIGNED": aligned,
                "PER_VECTOR": ALIGNMENT // source.itemsize,
            }
            self._launches.append((options, *upload(table, 2, digester.device)))

    def launch(self, sums: torch.Tensor) -> None:
        """Adds every part's digest, without its name's factor, to its sum."""
        for options, table, tiles in self._launches:
            _sum_parts[(len(tiles),)](table, tiles, sums, **options)
