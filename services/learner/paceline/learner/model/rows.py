"""Rows of a tensor by index, of which some are taken several times; gradients add up in a fixed order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.dtype = rows.shape, rows.dtype
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        wide = torch.promote_types(ctx.dtype, torch.float32)
        total, gradient = gradients[0].new_zeros(ctx.shape, dtype=wide), gradients[0].to(wide)
        if total.is_cuda:
            total.index_put_((index,), gradient, accumulate=True)  # sorts; index_add_ has no order on CUDA
        else:
            total.index_add_(0, index, gradient)
        return total.to(ctx.dtype), None


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """`rows[index]`, with gradients that are summed in at least float32.

    Args:
        rows: (N, ...).
        index: (M,) int64.
    """
    taken: Tensor = _TakeRows.apply(rows, index)  # type: ignore[no-untyped-call]
    return taken
