"""Draws a token per row of a batch, each by a number that only its seed and position determine.

A row's sample does not depend on the other rows, on their number, or on earlier draws. It can change only if
the batch's size changes the row's logits (in bfloat16, kernels may sum in another order).

B rows, V tokens.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

SLICE: Final = 512
"""Tokens per slice. Probabilities are summed per slice; the draw chooses a slice, then a token in it."""

SORTED_TOKENS = 1 << 22
"""Tokens to sort at a time; sorting needs several arrays of 4 and 8 bytes per token."""

# Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014): SplitMix64's constants, signed.
_GAMMA: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND: Final = 0x94D049BB133111EB - (1 << 64)
_BITS: Final = 48  # so few that the product of a number and a float64 sum stays below the sum


def uniforms(seeds: Tensor, length: int) -> Tensor:
    """Returns numbers in [0, 1) for positions 0 to length - 1 of each seed; (B, length), float64.

    Args:
        seeds: (B,), int64.
    """
    positions = torch.arange(length, device=seeds.device, dtype=torch.int64)
    return uniforms_at(seeds.unsqueeze(-1), positions)


def uniforms_at(seeds: Tensor, positions: Tensor) -> Tensor:
    """Returns numbers in [0, 1) for pairs of a seed and a position, float64, of their broadcast shape.

    Args:
        seeds: int64.
        positions: int64, not negative.
    """
    counters = _mixed(seeds * _GAMMA + _FIRST) + (positions + 1) * _GAMMA
    return _shifted(_mixed(counters), 64 - _BITS).double() * 2.0**-_BITS


def draw(log_probs: Tensor, numbers: Tensor) -> Tensor:
    """Returns the token at which each row's cumulative probability passes its number; (B,), int64.

    Args:
        log_probs: (B, V), normalized.
        numbers: (B,), float64, in [0, 1).
    """
    num_rows, vocab = log_probs.shape
    probs = F.pad(log_probs.exp(), (0, -vocab % SLICE)).view(num_rows, -1, SLICE)
    ends = probs.sum(-1, dtype=torch.float64).cumsum(-1)
    target = (numbers * ends[:, -1]).unsqueeze(-1)
    slices = (ends <= target).sum(-1, keepdim=True)
    starts = F.pad(ends, (1, 0)).gather(-1, slices)
    tokens = probs.gather(1, slices.unsqueeze(-1).expand(-1, 1, SLICE)).squeeze(1)
    within = (tokens.cumsum(-1, dtype=torch.float64) <= target - starts).sum(-1)
    # If rounding moves the last bit of a sum past the end of its slice, the next token is taken.
    return (slices.squeeze(-1) * SLICE + within).clamp_(max=vocab - 1)


def truncated(log_probs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Returns the distributions over only the likeliest tokens of each row; (B, V), normalized.

    Args:
        log_probs: (B, V), normalized.
        top_p: (B,): the likeliest tokens are kept until their probabilities add up to this; 1 keeps all.
        top_k: (B,), int64: the largest number of tokens that are kept; 0: all.
    """
    rows = max(1, SORTED_TOKENS // log_probs.shape[-1])  # in parts: an engine leaves little memory
    parts = zip(*(torch.split(x, rows) for x in (log_probs, top_p, top_k)), strict=True)
    return torch.cat([_truncated(*part) for part in parts])


def _truncated(log_probs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    vocab = log_probs.shape[-1]
    ordered, tokens = log_probs.sort(dim=-1, descending=True, stable=True)
    probs = ordered.exp().double()
    before = probs.cumsum(-1) - probs
    ranks = torch.arange(vocab, device=log_probs.device)
    most = torch.where(top_k > 0, top_k, vocab).unsqueeze(-1)
    share = torch.where(top_p < 1, top_p.double(), torch.inf).unsqueeze(-1)
    left_out = torch.empty_like(tokens, dtype=torch.bool)
    # The likeliest token is kept even if top_p is 0.
    left_out.scatter_(-1, tokens, ((before >= share) & (ranks > 0)) | (ranks >= most))
    return log_probs.masked_fill(left_out, -torch.inf).log_softmax(-1)


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shifts right and fills with zeros; torch's own shift fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
