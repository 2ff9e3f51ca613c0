"""Keeps AdamW's averages in 8 bits each (arXiv:2110.02861): codes of a dynamic map, and block scales.

average, float32 --> block's largest number --> scale, float32
                 --> number / scale --> the nearest of 256 values --> code, uint8

A block is up to 256 numbers of one row, so averages sharded by rows are bitwise equal on any number of ranks.
Vectors keep float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim.adamw import adamw

BLOCK: Final = 256
SLICE: Final = 16 << 20
"""How many numbers have float32 averages at a time."""

CODES: Final = ("exp_avg_codes", "exp_avg_sq_codes")
SCALES: Final = ("exp_avg_scales", "exp_avg_sq_scales")
_KINDS: Final = tuple(zip(CODES, SCALES, (True, False), strict=True))
"""Names of an average's codes and scales, and whether it is signed."""


def compact_forms(parameter: Tensor) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Returns the types and shapes of a matrix's averages, by name.

    Args:
        parameter: (R, ..., C), this rank's rows.
    """
    *rows, columns = parameter.shape
    codes = (torch.uint8, tuple(parameter.shape))
    scales = (torch.float32, (*rows, -(-columns // BLOCK)))
    return dict.fromkeys(CODES, codes) | dict.fromkeys(SCALES, scales)


def is_compact(state: Mapping[str, Tensor]) -> bool:
    """Returns whether a parameter's averages are in 8 bits."""
    return CODES[0] in state


def float32_step(
    parameters: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    group: Mapping[str, Any],
) -> None:
    """Takes AdamW's step on parameters with averages in float32; changes everything except the gradients."""
    beta1, beta2 = group["betas"]
    adamw(
        parameters,
        gradients,
        averages,
        squares,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def step_compact(
    parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor], step: Tensor, group: Mapping[str, Any]
) -> None:
    """Takes AdamW's step on a matrix whose averages are in 8 bits, a slice of its rows at a time.

    Args:
        parameter: (R, ..., C), changed.
        gradient: (R, ..., C).
        state: codes and scales on the parameter's device, changed.
        step: number of earlier steps, changed.
        group: AdamW's parameter group with its settings.
    """
    num_rows = max(1, SLICE // max(1, parameter[:1].numel()))
    for begin in range(0, len(parameter), num_rows):
        rows = slice(begin, begin + num_rows)
        averages = [
            expanded(state[codes][rows], state[scales][rows], signed=signed)
            for codes, scales, signed in _KINDS
        ]
        float32_step([parameter[rows]], [gradient[rows]], averages[:1], averages[1:], [step.clone()], group)
        for average, (codes, scales, signed) in zip(averages, _KINDS, strict=True):
            kept = compacted(average, signed=signed)
            state[codes][rows].copy_(kept[0])
            state[scales][rows].copy_(kept[1])
    step.add_(1)


def expanded(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Returns the numbers that codes and scales represent.

    Args:
        codes: (..., C) uint8.
        scales: (..., ceil(C / 256)) float32.
        signed: whether the codes use the map with negative values.

    Returns:
        (..., C) float32.
    """
    values = dynamic_map(signed, codes.device)[codes.int()]
    return values.mul_(scales.repeat_interleave(BLOCK, dim=-1)[..., : codes.shape[-1]])


def compacted(average: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Returns the codes and scales nearest to an average.

    Unsigned, no positive number becomes 0, because AdamW divides by the root of the squares' average.

    Args:
        average: (..., C) float32.
        signed: whether the average may have negative values.

    Returns:
        (..., C) uint8 and (..., ceil(C / 256)) float32.
    """
    values = dynamic_map(signed, average.device)
    columns = average.shape[-1]
    padded = pad(average.abs(), (0, -columns % BLOCK))
    blocks = padded.view(*padded.shape[:-1], -1, BLOCK)
    scales = blocks.amax(dim=-1)
    divisors = torch.where(scales > 0, scales, 1.0).repeat_interleave(BLOCK, dim=-1)[..., :columns]
    codes = torch.bucketize(average / divisors, (values[1:] + values[:-1]) / 2, out_int32=True)
    if not signed:
        codes = torch.where((codes == 0) & (average > 0), 1, codes)
    return codes.to(torch.uint8), scales


@cache
def dynamic_map(signed: bool, device: torch.device | str = "cpu") -> Tensor:
    """Returns the 256 values of the codes, in order: 0, 1, and the middles of parts of seven decades.

    The decade below 1 has the most parts; each lower decade has half as many.

    Returns:
        (256,) float32.
    """
    middles = []
    for exponent in range(7):
        parts = 2 ** (exponent if signed else exponent + 1)
        bounds = torch.linspace(0.1, 1.0, parts + 1, dtype=torch.float64)
        middles.append(10.0 ** (exponent - 6) * (bounds[1:] + bounds[:-1]) / 2)
    positive = torch.cat(middles)
    negative = [-positive] if signed else []
    values = torch.cat([*negative, torch.tensor([0.0, 1.0], dtype=torch.float64), positive])
    return values.sort().values.float().to(device)
