"""Computes the critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.algorithms.checks import require_range, require_same_shape
from paceline.algorithms.statistics import full_precision, keep, masked_mean


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the squared error of the values, clipped so that moving further than `clip` gains nothing.

    1/2 max((v - R)^2, (clip(v, V_old - c, V_old + c) - R)^2) per token: the value clipping of PPO as run in
    practice (arXiv:2005.12729, section 3).

    Args:
        values: (B, T), differentiated.
        old_values: (B, T), the critic's values before the update.
        returns: (B, T), the targets.
        mask: (B, T).
        clip: c above 0, in units of value.

    Returns:
        Per-token losses (B, T), 0 under the mask, and {"vf_clipfrac": the share of unmasked tokens whose
        clipped error is larger}.
    """
    require_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    require_range("clip", clip, above=0.0)
    values, old_values, returns = (keep(x, mask) for x in (values, old_values.detach(), returns.detach()))
    clipped = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    free_error = (values - returns).square()
    clipped_error = (clipped - returns).square()
    loss = 0.5 * torch.maximum(free_error, clipped_error)
    return loss, {"vf_clipfrac": masked_mean(full_precision(clipped_error > free_error), mask)}
