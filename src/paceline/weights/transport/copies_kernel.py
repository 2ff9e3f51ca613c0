"""Many copies, with a cast, as one Triton kernel: hundreds of launches would take longer than a round's transfer.

It leaves some multiprocessors alone. A block of NCCL's needs almost a whole one: where copies fill the GPU, the next round begins up
to 0.1 ms late on one rank, and all others wait for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from paceline.weights.transport.tables_cuda import (
    ALIGNMENT,
    ROWS,
    TRITON_TYPES,
    as_matrix,
    is_aligned,
    upload,
)

Move = tuple[torch.Tensor, torch.Tensor]

_COLUMNS = 1024
_NUM_WARPS = 32
_LEFT_ALONE = 36
"""Multiprocessors; NCCL was seen to take up to 32 for sends and receives"""


@triton.jit(do_not_specialize=["num_tiles"])  # type: ignore[untyped-decorator,unused-ignore]
def _move(  # type: ignore[no-untyped-def]
    moves,
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
        move = moves + tl.load(tiles + 2 * tile) * 6
        first = tl.load(tiles + 2 * tile + 1)
        source = tl.load(move).to(tl.pointer_type(SOURCE))
        source_stride = tl.load(move + 1)
        target = tl.load(move + 2).to(tl.pointer_type(TARGET))
        target_stride = tl.load(move + 3)
        num_rows = tl.load(move + 4)
        num_columns = tl.load(move + 5)
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


class MoveKernel:
    """Tables of the moves on the device, and the launches over them; `rest` are those that it cannot do."""

    def __init__(self, moves: Sequence[Move], device: torch.device) -> None:
        self.rest: list[Move] = []
        self._launches: list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]] = []
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._most_programs = max(1, num_processors - _LEFT_ALONE)
        grouped: dict[tuple[torch.dtype, torch.dtype, bool], list[list[int]]] = {}
        for source, target in moves:
            mine, theirs = as_matrix(source), as_matrix(target)
            if mine is None or theirs is None or mine.shape != theirs.shape:
                self.rest.append((source, target))
                continue
            row = [mine.data_ptr(), mine.stride(0), theirs.data_ptr(), theirs.stride(0), *mine.shape]
            key = (source.dtype, target.dtype, is_aligned((mine, theirs)))
            grouped.setdefault(key, []).append(row)
        for (mine_type, their_type, aligned), rows in grouped.items():
            options = {
                "SOURCE": TRITON_TYPES[mine_type],
                "TARGET": TRITON_TYPES[their_type],
                "ROWS": ROWS,
                "COLUMNS": _COLUMNS,
                "ALIGNED": aligned,
                "PER_VECTOR": ALIGNMENT // max(mine_type.itemsize, their_type.itemsize),
                "num_warps": _NUM_WARPS,
            }
            self._launches.append((options, *upload(rows, 4, device)))

    def launch(self) -> None:
        """Does all but the rest."""
        for options, table, tiles in self._launches:
            _move[(min(len(tiles), self._most_programs),)](table, tiles, len(tiles), **options)

    def warm_up(self) -> None:
        """Compiles what `launch` needs by moving nothing."""
        for options, table, tiles in self._launches:
            _move[(1,)](torch.zeros_like(table[:1]), torch.zeros_like(tiles[:1]), 1, **options)
