"""`draw.draw` and its log-probabilities as two GPU kernels, instead of about thirty of torch's.

    sum_slices:   the logits of a row's slice -> the largest logit, and the sum of exponentials
    choose_token: the slices' sums -> a slice -> a token in it, and its log-probability

B rows, V tokens, S slices. A row's token depends on no other row.
"""

# Triton reads the annotations of kernels, so they can have none for mypy.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

SLICE: Final = 1024
"""Number of tokens of a slice"""


@triton.jit
def sum_slices(
    logits,
    row_stride,
    divisors,
    tops,
    sums,
    vocab,
    num_slices,
    SLICE: tl.constexpr,
):
    """Runs one program per row and slice."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = part * SLICE + tl.arange(0, SLICE)
    lowest = -float("inf")
    x = tl.load(logits + row * row_stride + tokens, mask=tokens < vocab, other=lowest).to(tl.float32)
    x = x / tl.load(divisors + row)
    top = tl.max(x, axis=0)
    weights = tl.where(x == lowest, 0.0, tl.exp(x - top))
    tl.store(tops + row * num_slices + part, top)
    tl.store(sums + row * num_slices + part, tl.sum(weights.to(tl.float64), axis=0))


@triton.jit
def choose_token(
    logits,
    row_stride,
    divisors,
    is_greedy,
    tops,
    sums,
    table_rows,
    positions,
    numbers,
    log_probs,
    length,
    chosen,
    vocab,
    num_slices,
    SLICE: tl.constexpr,
    PADDED_SLICES: tl.constexpr,
):
    """Runs one program per row; writes the token, and its log-probability into the row's table."""
    row = tl.program_id(0).to(tl.int64)
    lowest = -float("inf")
    parts = tl.arange(0, PADDED_SLICES)
    place = tl.load(table_rows + row) * length + tl.load(positions + row)
    greedy = tl.load(is_greedy + row) != 0

    part_tops = tl.load(tops + row * num_slices + parts, mask=parts < num_slices, other=lowest)
    part_sums = tl.load(sums + row * num_slices + parts, mask=parts < num_slices, other=0.0)
    top = tl.max(part_tops, axis=0)
    part_sums = tl.where(part_sums == 0.0, 0.0, part_sums * tl.exp(part_tops - top).to(tl.float64))
    total = tl.sum(part_sums, axis=0)
    target = tl.load(numbers + place) * total
    ends = tl.cumsum(part_sums, axis=0)
    # If rounding moves the target past the last sum, the last slice or token with a probability is taken.
    last = tl.max(tl.where(part_sums > 0.0, parts, 0), axis=0)
    drawn = tl.minimum(tl.sum((ends <= target).to(tl.int32), axis=0), last)
    best = tl.min(tl.where(part_tops == top, parts, PADDED_SLICES - 1), axis=0)
    part = tl.where(greedy, best, drawn)
    start = tl.max(tl.where(parts < part, ends, 0.0), axis=0)

    within = tl.arange(0, SLICE)
    tokens = part * SLICE + within
    x = tl.load(logits + row * row_stride + tokens, mask=tokens < vocab, other=lowest).to(tl.float32)
    x = x / tl.load(divisors + row)
    part_top = tl.max(x, axis=0)
    weights = tl.where(x == lowest, 0.0, tl.exp(x - part_top)).to(tl.float64)
    ends_within = start + tl.cumsum(weights, axis=0) * tl.exp(part_top - top).to(tl.float64)
    last = tl.max(tl.where(weights > 0.0, within, 0), axis=0)
    drawn = tl.minimum(tl.sum((ends_within <= target).to(tl.int32), axis=0), last)
    best = tl.min(tl.where(x == part_top, within, SLICE - 1), axis=0)
    offset = tl.where(greedy, best, drawn)
    logit = tl.sum(tl.where(within == offset, x, 0.0), axis=0)
    log_prob = (logit - top).to(tl.float64) - tl.log(total)
    tl.store(chosen + row, part * SLICE + offset)
    tl.store(log_probs + place, log_prob.to(tl.float32))


def draw_into(
    logits: Tensor,
    positions: Tensor,
    *,
    table_rows: Tensor,
    divisors: Tensor,
    is_greedy: Tensor,
    numbers: Tensor,
    log_probs: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Draws a token per row and records its log-probability; (B, 1), of `dtype`.

    Args:
        logits: (B, V), any floating type, rows contiguous.
        positions: (B,), any integer type: the columns of `numbers` and `log_probs`.
        table_rows: (B,), int64: the rows of `numbers` and `log_probs`.
        divisors: (B,), float32: temperatures, and 1 for greedy rows.
        is_greedy: (B,), uint8.
        numbers: (R, L), float64, in [0, 1).
        log_probs: (R, L), float32; written at the rows and positions.
    """
    batch, vocab = logits.shape
    num_slices = triton.cdiv(vocab, SLICE)
    tops = torch.empty(batch, num_slices, dtype=torch.float32, device=logits.device)
    sums = torch.empty(batch, num_slices, dtype=torch.float64, device=logits.device)
    chosen = torch.empty(batch, 1, dtype=dtype, device=logits.device)
    stride, length = logits.stride(0), numbers.shape[1]
    sum_slices[(batch, num_slices)](logits, stride, divisors, tops, sums, vocab, num_slices, SLICE=SLICE)
    choose_token[(batch,)](
        logits,
        stride,
        divisors,
        is_greedy,
        tops,
        sums,
        table_rows,
        positions,
        numbers,
        log_probs,
        length,
        chosen,
        vocab,
        num_slices,
        SLICE=SLICE,
        PADDED_SLICES=triton.next_power_of_2(num_slices),
    )
    return chosen
