"""Computes the gradient of taking rows with a Triton kernel. Imported only with CUDA."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

_COLUMNS = 1024


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sum_rows(  # type: ignore[no-untyped-def]
    taken, order, starts, total, num_columns, COLUMNS: tl.constexpr, KIND: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    sums = tl.zeros((COLUMNS,), dtype=KIND)
    for number in range(tl.load(starts + row), tl.load(starts + row + 1)):
        place = tl.load(order + number)
        sums += tl.load(taken + place * num_columns + columns, mask=inside, other=0.0).to(KIND)
    tl.store(total + row * num_columns + columns, sums.to(total.dtype.element_ty), mask=inside)


def sum_rows(taken: Tensor, order: Tensor, starts: Tensor, shape: Sequence[int]) -> Tensor:
    """Sums every row's gradients over the places to which it was taken, in order.

    Args:
        taken: (M, ...), the gradients at the places.
        order, starts: fields of a `RowIndex`.
        shape: (N, ...), the result's shape; its type is that of `taken`, but sums are at least float32.
    """
    taken, total = taken.contiguous(), taken.new_empty(shape)
    num_columns = math.prod(shape[1:])
    kind = tl.float64 if taken.dtype == torch.float64 else tl.float32
    columns = min(_COLUMNS, triton.next_power_of_2(num_columns))
    with torch.cuda.device(taken.device):
        _sum_rows[(shape[0], triton.cdiv(num_columns, columns))](
            taken, order, starts, total, num_columns, COLUMNS=columns, KIND=kind
        )
    return total
