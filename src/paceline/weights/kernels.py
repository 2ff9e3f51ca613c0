"""Copies or digests many tensor parts in one launch of a Triton kernel. Imported only with CUDA.

Hundreds of launches would take longer than the transfer of a round. Each kernel reads a table of parts
(matrices in memory) and a table of tiles: (part, first row) for every `_ROWS` rows of a part.

Copies leave some multiprocessors free. An NCCL block needs almost all of one: if copies filled the GPU, the
next round could begin up to 0.1 ms late on one rank, and all others would wait.

A digest program takes `_ROWS` rows of one part, walks along their columns with one 64-bit sum per lane, and
adds its share to the part's sum atomically. Integer addition modulo 2^64 does not depend on the order, so the
result is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from paceline.weights.geometry.columns import IntArray
from paceline.weights.geometry.views import ALIGNMENT, CopyTable

_ROWS = 8
"""Rows per step of a program"""

_DIGEST_COLUMNS = 256
_COPY_COLUMNS = 1024
"""Columns per step of a program"""

_COPY_WARPS = 32

_FREE_PROCESSORS = 36
"""Multiprocessors that copies leave free; NCCL was seen to take up to 32 for sends and receives"""

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_PATTERNS = {2: tl.int16, 4: tl.int32}


@triton.jit(do_not_specialize=["num_tiles"])  # type: ignore[untyped-decorator,unused-ignore]
def _copy_parts(  # type: ignore[no-untyped-def]
    copies,
    tiles,
    num_tiles,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PER_VECTOR: tl.constexpr,
):
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        copy = copies + tl.load(tiles + 2 * tile) * 6
        first = tl.load(tiles + 2 * tile + 1)
        source = tl.load(copy).to(tl.pointer_type(SOURCE))
        source_stride = tl.load(copy + 1)
        target = tl.load(copy + 2).to(tl.pointer_type(TARGET))
        target_stride = tl.load(copy + 3)
        num_rows = tl.load(copy + 4)
        num_columns = tl.load(copy + 5)
        if ALIGNED:
            source = tl.multiple_of(source, 16)
            target = tl.multiple_of(target, 16)
            source_stride = tl.multiple_of(source_stride, PER_VECTOR)
            target_stride = tl.multiple_of(target_stride, PER_VECTOR)
            num_columns = tl.multiple_of(num_columns, PER_VECTOR)
        rows = first + tl.arange(0, ROWS)
        for start in range(0, num_columns, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
            values = tl.load(source + rows[:, None] * source_stride + columns[None, :], mask=inside)
            tl.store(
                target + rows[:, None] * target_stride + columns[None, :], values.to(TARGET), mask=inside
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
        # This lets the compiler load 16 bytes at a time.
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


class CopyKernel:
    """Copies and casts between matrices on one device."""

    def __init__(self, tables: Sequence[CopyTable], device: torch.device) -> None:
        self._launches: list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]] = []
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._most_programs = max(1, num_processors - _FREE_PROCESSORS)
        for table in tables:
            options = {
                "SOURCE": _TYPES[table.source],
                "TARGET": _TYPES[table.target],
                "ROWS": _ROWS,
                "COLUMNS": _COPY_COLUMNS,
                "ALIGNED": table.is_aligned,
                "PER_VECTOR": ALIGNMENT // max(table.source.itemsize, table.target.itemsize),
                "num_warps": _COPY_WARPS,
            }
            self._launches.append((options, *_upload(table.rows, 4, device)))

    def launch(self) -> None:
        """Queues the copies of all tables."""
        for options, table, tiles in self._launches:
            _copy_parts[(min(len(tiles), self._most_programs),)](table, tiles, len(tiles), **options)

    def warm_up(self) -> None:
        """Compiles what `launch` needs; copies nothing."""
        for options, table, tiles in self._launches:
            _copy_parts[(1,)](torch.zeros_like(table[:1]), torch.zeros_like(tiles[:1]), 1, **options)


class DigestKernel:
    """Computes the digests of parts of tensors.

    Args:
        parts: for each part its values, the factors R of its rows and K of its columns, and the index of its
            sum.
        dtype: element type to which values are cast first.

    `skipped` holds the indices of parts that the kernel cannot digest, because they are not matrices in
    memory.
    """

    def __init__(
        self,
        parts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.skipped: list[int] = []
        self._factors: list[torch.Tensor] = []  # keeps alive what the addresses point to
        self._launches: list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]] = []
        grouped: dict[tuple[torch.dtype, bool], list[list[int]]] = {}
        for index, (values, rows, columns, output) in enumerate(parts):
            matrix = _as_matrix(values)
            if matrix is None:
                self.skipped.append(index)
                continue
            self._factors += [rows, columns]
            # A vector is one row: its row factors belong to the columns of that row.
            by_row, by_column = (columns, rows) if values.ndim == 1 else (rows, columns)
            place = [matrix.data_ptr(), matrix.stride(0), *matrix.shape]
            entry = [*place, by_row.data_ptr(), by_column.data_ptr(), output]
            grouped.setdefault((matrix.dtype, _is_aligned(matrix)), []).append(entry)
        for (source, aligned), table in grouped.items():
            options = {
                "SOURCE": _TYPES[source],
                "WIRE": _TYPES[dtype],
                "PATTERN": _PATTERNS[dtype.itemsize],
                "ROWS": _ROWS,
                "COLUMNS": _DIGEST_COLUMNS,
                "ALIGNED": aligned,
                "PER_VECTOR": ALIGNMENT // source.itemsize,
            }
            self._launches.append((options, *_upload(table, 2, device)))

    def launch(self, sums: torch.Tensor) -> None:
        """Adds every part's digest, without the factor of its tensor's name, to its sum."""
        for options, table, tiles in self._launches:
            _sum_parts[(len(tiles),)](table, tiles, sums, **options)


def _as_matrix(values: torch.Tensor) -> torch.Tensor | None:
    """Views the tensor as rows of contiguous elements; None if that needs a copy. A vector is one row."""
    try:
        matrix = values.view(values.shape[0], -1) if values.ndim > 1 else values.unsqueeze(0)
    except RuntimeError:  # no view has this shape; `flatten` would copy a stack of experts
        return None
    return matrix if matrix.shape[1] == 1 or matrix.stride(1) == 1 else None


def _is_aligned(matrix: torch.Tensor) -> bool:
    """Returns whether all rows start at, and have a length of, multiples of `ALIGNMENT` bytes."""
    places = (matrix.data_ptr(), matrix.stride(0) * matrix.itemsize, matrix.shape[1] * matrix.itemsize)
    return all(num_bytes % ALIGNMENT == 0 for num_bytes in places)


def _upload(
    rows: Sequence[Sequence[int]] | IntArray, num_rows: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uploads the tables of parts and tiles; field `num_rows` of a part is its number of rows."""
    table = np.asarray(rows, dtype=np.int64)
    counts = -(-table[:, num_rows] // _ROWS)
    part = np.repeat(np.arange(len(rows)), counts)
    begins = np.repeat(np.cumsum(counts) - counts, counts)
    tiles = np.stack([part, (np.arange(counts.sum()) - begins) * _ROWS], axis=1).astype(np.int64)
    return torch.from_numpy(table).to(device), torch.from_numpy(tiles).to(device)
