"""Takes rows of a tensor by index, possibly repeated; gradients add up in a fixed order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.learner.batch.row_index import RowIndex


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, order: Tensor | None, starts: Tensor | None) -> Tensor:
        ctx.save_for_backward(index, order, starts)
        ctx.shape, ctx.dtype = rows.shape, rows.dtype
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,), (index, order, starts) = gradients, ctx.saved_tensors
        if order is not None and gradient.is_cuda:
            from paceline.learner.model.decoder import rows_kernel

            return rows_kernel.sum_rows(gradient, order, starts, ctx.shape), None, None, None
        wide = torch.promote_types(ctx.dtype, torch.float32)
        total, gradient = gradient.new_zeros(ctx.shape, dtype=wide), gradient.to(wide)
        if total.is_cuda:
            total.index_put_((index,), gradient, accumulate=True)  # deterministic, unlike index_add_ on CUDA
        else:
            total.index_add_(0, index, gradient)
        return total.to(ctx.dtype), None, None, None


def take_rows(rows: Tensor, index: Tensor | RowIndex) -> Tensor:
    """Returns `rows[index]`, with gradients that are summed in at least float32.

    Args:
        rows: (N, ...).
        index: (M,) int64; a RowIndex if it is used often, which saves CUDA repeated sorting.
    """
    parts = (index.rows, index.order, index.starts) if isinstance(index, RowIndex) else (index, None, None)
    taken: Tensor = _TakeRows.apply(rows, *parts)  # type: ignore[no-untyped-call]
    return taken
