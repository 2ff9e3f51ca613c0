"""Computes importance weights for the mismatch between sampler and trainer in kernels or precision.

w = exp(clip(old_log_probs - rollout_log_probs, -20, 20)): the trainer's probability of a token over the
sampler's. All weights are detached, of shape (B, T) and 0 under the mask; the caller multiplies the
per-token policy loss with them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.algorithms.checks import require_range, require_same_shape
from paceline.algorithms.statistics import keep, masked_mean, masked_sum
from paceline.core.errors import ConfigError

LOG_WEIGHT_BOUND = 20.0
LEVELS = ("token", "sequence", "geometric")


def rollout_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, level: str = "token"
) -> Tensor:
    """Returns the importance weights, (B, T).

    Args:
        old_log_probs: (B, T), the trainer's log-probs before the update.
        rollout_log_probs: (B, T), the sampler's log-probs.
        mask: (B, T).
        level: "token": each token has its own weight; "sequence": the product over its sequence; "geometric":
            the geometric mean over its sequence.

    Raises:
        ConfigError: unknown level.
        NumericsError: shapes differ.
    """
    if level not in LEVELS:
        raise ConfigError(
            f"rollout correction level {level!r} is not known; choose one of {', '.join(LEVELS)}"
        )
    log_weights = _log_ratio(old_log_probs, rollout_log_probs, mask)
    if level == "sequence":
        log_weights = log_weights.sum(-1, keepdim=True).expand(mask.shape)
    elif level == "geometric":
        log_weights = masked_mean(log_weights, mask, dim=-1).unsqueeze(-1).expand(mask.shape)
    return keep(log_weights.clamp(-LOG_WEIGHT_BOUND, LOG_WEIGHT_BOUND).exp(), mask)


def tis(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, cap: float, level: str = "token"
) -> Tensor:
    """Truncates importance weights to min(w, cap); cap above 0, level and shapes as in `rollout_weights`.

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    require_range("cap", cap, above=0.0)
    return rollout_weights(old_log_probs, rollout_log_probs, mask, level).clamp(max=cap)


def icepop(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """Returns w where low <= w <= high, else 0, per token (IcePop, arXiv:2510.18855); 0 <= low < high."""
    _check_range(low, high)
    weights = rollout_weights(old_log_probs, rollout_log_probs, mask)
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


def sequence_mask(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    low: float,
    high: float,
    level: str = "sequence",
) -> Tensor:
    """Returns 1 on tokens of sequences whose weight lies in [low, high], else 0, (B, T).

    Args:
        low: lower bound, at least 0.
        high: upper bound, above low.
        level: the weight to compare: "sequence", or "geometric", which does not depend on the length. With
            "token", one token out of range drops its sequence.

    The other arguments as in `rollout_weights`.
    """
    _check_range(low, high)
    weights = rollout_weights(old_log_probs, rollout_log_probs, mask, level)
    inside = (weights >= low) & (weights <= high)
    accepted = (inside | ~mask.bool()).all(-1, keepdim=True)
    return keep(accepted.to(weights.dtype).expand(mask.shape), mask)


def mismatch_kl(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Estimates KL(sampler || trainer) per token, on the sampler's own tokens, (B, T) in float64.

    k3 without a clip, exp(d) - 1 - d with d = old - rollout log-probs: never negative, and 0 under the mask.
    Its mean over all tokens is the metric `rollout/mismatch_kl`.
    """
    difference = _log_ratio(old_log_probs, rollout_log_probs, mask).double()
    return difference.exp() - 1.0 - difference


def log_prob_diff_max(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Returns the largest |old - rollout log-prob| of an unmasked token, 0-dim; 0 if there is none."""
    difference = _log_ratio(old_log_probs, rollout_log_probs, mask).abs()
    return difference.amax() if difference.numel() else difference.sum()


def largest_weight(weights: Tensor, mask: Tensor) -> Tensor:
    """Returns the largest weight of an unmasked token, 0-dim; 0 if there is none. Parts combine by max."""
    kept = keep(weights.detach(), mask)
    return kept.amax() if kept.numel() else kept.sum()


def weight_sums(weights: Tensor, mask: Tensor) -> Tensor:
    """Returns [sum w, sum w^2, n] of the unmasked tokens, (3,), which add up over parts."""
    weights = keep(weights.detach(), mask)
    count = mask.bool().sum().to(weights.dtype)
    return torch.stack([masked_sum(weights, mask), masked_sum(weights.square(), mask), count])


def effective_sample_size(sums: Tensor) -> Tensor:
    """Returns Kish's effective sample size per token, (sum w)^2 / (n sum w^2), in [0, 1]; 0-dim.

    1 means equal weights, 1/n that one token carries all the weight, 0 that all weights are 0 or no token is
    unmasked.

    Args:
        sums: (3,), the `weight_sums` of all parts, added up.
    """
    total, squares, count = sums.unbind()
    denominator = count * squares
    return torch.where(
        denominator > 0, total.square() / denominator.clamp(min=torch.finfo(sums.dtype).tiny), 0.0
    )


def _log_ratio(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    require_same_shape(old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
    return keep(old_log_probs.detach(), mask) - keep(rollout_log_probs.detach(), mask)


def _check_range(low: float, high: float) -> None:
    require_range("low", low, at_least=0.0)
    require_range("high", high, above=low)
