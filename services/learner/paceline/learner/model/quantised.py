"""Dequantises a checkpoint's tensors as they are read: block FP8 and MXFP4.

Block FP8 (DeepSeek-V3, FP8 models of Qwen 3): NAME in float8, NAME_scale_inv with a factor per block.
MXFP4 (GPT-OSS's experts): NAME_blocks with two numbers per byte, NAME_scales with an exponent per 32 numbers.

Bytes are looked up in tables, several times faster on a CPU than torch's conversion of float8.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import ModelError

FP8_SCALES = "_scale_inv"
MXFP4_PARTS = ("_blocks", "_scales")
_NUMBERS_PER_SCALE = 32
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def block_fp8(name: str, values: Any, scales: Any, block: tuple[int, int]) -> Callable[[int, int], Tensor]:
    """Returns a reader of rows [start, stop) of a matrix in block FP8, in float32.

    Args:
        values: a slice of safetensors, (rows, columns) in float8.
        scales: a slice of safetensors with a factor per block; blocks at the edges are cut off.

    Raises:
        ModelError: the number of factors differs from that of the blocks.
    """
    height, width = values.get_shape()
    rows, columns = block
    if tuple(scales.get_shape()) != (expected := (-(-height // rows), -(-width // columns))):
        raise ModelError(
            f"{name}{FP8_SCALES} has shape {tuple(scales.get_shape())}; {height} x {width} numbers in blocks "
            f"of {rows} x {columns} need {expected}: download the model again, or take one in bfloat16"
        )

    def read(start: int, stop: int) -> Tensor:
        first = start // rows
        factors = scales[first : -(-stop // rows)].float()
        factors = factors.repeat_interleave(rows, 0)[start - first * rows : stop - first * rows]
        stored: Tensor = values[start:stop]
        codes = stored.view(torch.uint8).flatten().int()
        numbers = _float8_table(stored.dtype).index_select(0, codes).view(stored.shape)
        for block_index, begin in enumerate(range(0, width, columns)):
            numbers[:, begin : begin + columns] *= factors[:, block_index, None]
        return numbers

    return read


def mxfp4(name: str, blocks: Any, scales: Any, shape: torch.Size) -> Callable[[int, int], Tensor]:
    """Returns a reader of experts [start, stop) of a stack (E, K, N) in MXFP4, in bfloat16, which is exact.

    Args:
        blocks: a slice of safetensors, (E, N, K / 32, 16) bytes.
        scales: a slice of safetensors, (E, N, K / 32).

    Raises:
        ModelError: blocks or scales do not fit the shape.
    """
    num_experts, inner, outer = shape
    expected = (num_experts, outer, inner // _NUMBERS_PER_SCALE)
    stored = tuple(blocks.get_shape()), tuple(scales.get_shape())
    if inner % _NUMBERS_PER_SCALE or stored != ((*expected, _NUMBERS_PER_SCALE // 2), expected):
        raise ModelError(
            f"{name}: the model needs shape {tuple(shape)}, which MXFP4 blocks of shape {stored[0]} with "
            f"scales of shape {stored[1]} do not hold: download it again, or take one in bfloat16"
        )

    def read(start: int, stop: int) -> Tensor:
        pairs, powers = _fp4_tables()
        codes, exponents = blocks[start:stop], scales[start:stop]
        numbers = pairs.index_select(0, codes.flatten().int()).view(torch.bfloat16)
        factors = powers.index_select(0, exponents.flatten().int())
        numbers.view(len(factors), _NUMBERS_PER_SCALE).mul_(factors.unsqueeze(-1))
        return numbers.view(-1, outer, inner).transpose(1, 2)

    return read


@cache
def _float8_table(dtype: torch.dtype) -> Tensor:
    """Returns the numbers of the 256 bytes, in float32."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


@cache
def _fp4_tables() -> tuple[Tensor, Tensor]:
    """Returns the two bfloat16 numbers of each byte, as bits of an int32, and the power of each exponent."""
    numbers = torch.tensor(_FP4, dtype=torch.bfloat16)
    low, high = numbers.repeat(16), numbers.repeat_interleave(16)
    pairs = torch.stack([low, high], dim=1).view(torch.int32).flatten()
    return pairs, torch.ldexp(torch.ones(256), torch.arange(256) - 127).bfloat16()
