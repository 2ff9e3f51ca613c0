"""Clips the ratio of new to old probabilities, of a token or of its sequence."""

from __future__ import annotations

import torch

from paceline.algorithms.checks import require_range
from paceline.algorithms.policy_losses.base import (
    LossInputs,
    LossOutputs,
    check_clip,
    log_ratio_and_advantages,
    ppo_kl,
    share,
)
from paceline.algorithms.statistics import keep, masked_mean


def ppo_clip(
    inputs: LossInputs,
    clip_low: float,
    clip_high: float,
    dual_clip_c: float | None = None,
) -> LossOutputs:
    """Computes PPO's clipped surrogate (arXiv:1707.06347, eq. 7), with the dual clip of arXiv:1912.09729.

    L = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)); with c, where A < 0, min(L, -A c).

    Args:
        inputs: log_probs, old_log_probs, advantages and mask are read.
        clip_low: in [0, 1].
        clip_high: at least 0; larger than clip_low is DAPO's clip-higher (arXiv:2503.14476).
        dual_clip_c: above 1, or None for no dual clip.

    Returns:
        The loss and `pg_clipfrac` (share of tokens whose clipped term is larger), `pg_clipfrac_lower` (share
        where A < 0 and the dual bound is smaller), `ppo_kl` (mean of -(log-ratio)).
    """
    check_clip(clip_low, clip_high)
    if dual_clip_c is not None:
        require_range("dual_clip_c", dual_clip_c, above=1.0)
    log_ratio, advantages = log_ratio_and_advantages(inputs)
    mask = inputs.mask
    ratio = log_ratio.exp()
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(free, clipped)
    bounded = torch.zeros_like(mask, dtype=torch.bool)
    if dual_clip_c is not None:
        bound = -advantages * dual_clip_c
        bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
    return LossOutputs(
        loss,
        {
            "pg_clipfrac": share(clipped > free, mask),
            "pg_clipfrac_lower": share(bounded, mask),
            "ppo_kl": ppo_kl(log_ratio, mask),
        },
    )


def gspo(
    inputs: LossInputs,
    clip_low: float,
    clip_high: float,
) -> LossOutputs:
    """Applies PPO's clip to the ratio of sequences (GSPO in its token form, arXiv:2507.18071).

    A token's ratio has the value of its sequence, s = exp(mean of the log-ratios), and the gradient of its
    own log-prob: stopgrad(s) pi / stopgrad(pi), with the logarithm clamped to at most 10. Clip ranges are far
    smaller than PPO's (3e-4 and 4e-4 in the paper); the aggregation is `seq-mean-token-mean`.

    Arguments, results and metrics as in `ppo_clip`; `pg_clipfrac_lower` is always 0.
    """
    check_clip(clip_low, clip_high)
    log_ratio, advantages = log_ratio_and_advantages(inputs)
    mask = inputs.mask
    sequence = masked_mean(log_ratio.detach(), mask, dim=-1).unsqueeze(-1)
    ratio = torch.clamp(log_ratio - log_ratio.detach() + sequence, max=10.0).exp()
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return LossOutputs(
        keep(torch.maximum(free, clipped), mask),
        {
            "pg_clipfrac": share(clipped > free, mask),
            "pg_clipfrac_lower": share(torch.zeros_like(mask, dtype=torch.bool), mask),
            "ppo_kl": ppo_kl(log_ratio, mask),
        },
    )


def geo_mean(
    inputs: LossInputs,
    clip_low: float,
    clip_high: float,
) -> LossOutputs:
    """Replaces each ratio by the geometric mean of its sequence (GMPO, arXiv:2507.20673).

    Each log-ratio is clipped to at most clip_high if its advantage is positive, else to at least -clip_low;
    each token gets the loss of its sequence, -mean(A) exp(mean of the clipped log-ratios), so that
    `seq-mean-token-mean` gives the mean over sequences.

    Args:
        clip_low: at least 0, in log-ratio (the paper: 0.4).
        clip_high: at least 0, in log-ratio.

    The other arguments as in `ppo_clip`. Metrics: `pg_clipfrac` (share of clipped tokens), `ppo_kl`.
    """
    require_range("clip_low", clip_low, at_least=0.0)
    require_range("clip_high", clip_high, at_least=0.0)
    log_ratio, advantages = log_ratio_and_advantages(inputs)
    mask = inputs.mask
    sign = advantages.sign()
    clipped = sign * log_ratio.clamp(-clip_low, clip_high)
    log_ratio_pessimistic = sign * torch.minimum(sign * log_ratio, clipped)
    ratio = masked_mean(log_ratio_pessimistic, mask, dim=-1).exp()
    loss = -masked_mean(advantages, mask, dim=-1) * ratio
    return LossOutputs(
        keep(loss.unsqueeze(-1).expand(mask.shape), mask),
        {
            "pg_clipfrac": share(clipped < sign * log_ratio, mask),
            "ppo_kl": ppo_kl(log_ratio, mask),
        },
    )
