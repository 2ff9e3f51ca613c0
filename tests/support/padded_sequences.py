"""Sequences of many lengths, with prefixes, in one packed row, and their attention one by one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.learner.batch.types import PackedSequences


def many(seed: int, *, longest: int) -> tuple[list[int], list[int | None]]:
    """Lengths and prefixes: prompts with some responses each, and sequences by themselves."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    prefixes: list[int | None] = []
    for _ in range(12):
        prompt = len(lengths)
        lengths.append(int(rng.integers(1, longest)))
        prefixes.append(None)
        for _ in range(int(rng.integers(0, 5))):
            lengths.append(int(rng.integers(1, longest)))
            prefixes.append(prompt)
    return lengths, prefixes


def attention_one_by_one(
    inputs: list[Tensor], packed: PackedSequences, sees: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Attention of each sequence in a call of its own; nothing is padded.

    `sees` masks positions: queries (Q, 1), prefixes left out, and keys (K,), which begin with the prefix.
    """
    q, k, v = (x[0] for x in inputs)
    outputs = []
    for block in packed.blocks:
        for start in range(block.start, block.stop, block.length):
            places = [*range(block.prefix_start, block.prefix_start + block.prefix_length)]
            places += range(start, start + block.length)
            keys = torch.arange(len(places))
            mask = sees(keys[block.prefix_length :, None], keys)
            queries = q[:, start : start + block.length]
            outputs.append(
                F.scaled_dot_product_attention(
                    queries, k[:, places], v[:, places], attn_mask=mask, enable_gqa=True
                )
            )
    return torch.cat(outputs, 1).transpose(0, 1)[None]
