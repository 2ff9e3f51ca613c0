"""Computes recurrences over positions, from the last token to the first, in log2(T) steps.

B sequences, T positions. A masked position has no term; it passes on the value of the next position.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.algorithms.statistics import keep


def discounted_sums(terms: Tensor, mask: Tensor, factor: float | Tensor) -> Tensor:
    """Returns x_t = terms_t + factor x_{t+1} where the mask is 1, else x_{t+1}; (B, T), 0 after the end.

    Neighbours are combined into pairs, pairs into fours and so on, in float64, so the summation order differs
    from a loop's.

    Args:
        terms: (B, T); ignored where the mask is 0.
        mask: (B, T).
        factor: one number, or one per sequence, (B,).
    """
    if isinstance(factor, Tensor):
        factor = factor.double().unsqueeze(-1)
    sums = keep(terms, mask).double()
    factors = torch.where(mask.bool(), torch.ones_like(sums) * factor, 1.0)
    reach, length = 1, terms.shape[-1]
    while reach < length:
        sums = sums + factors * _shifted(sums, reach)
        factors = factors * _shifted(factors, reach)
        reach *= 2
    return sums.to(keep(terms, mask).dtype)


def next_unmasked(x: Tensor, mask: Tensor) -> Tensor:
    """Returns, per position, `x` at the next position with mask 1; 0 where none follows; (B, T)."""
    length = x.shape[-1]
    places = torch.where(mask.bool(), torch.arange(length, device=x.device), length)
    nearest = places.flip(-1).cummin(-1).values.flip(-1)  # at or after each position
    following = F.pad(nearest[:, 1:], (0, 1), value=length)
    return F.pad(keep(x, mask), (0, 1)).gather(-1, following)


def _shifted(x: Tensor, reach: int) -> Tensor:
    """Returns x_{t + reach} at t, 0 beyond the end."""
    return F.pad(x[:, reach:], (0, reach))
