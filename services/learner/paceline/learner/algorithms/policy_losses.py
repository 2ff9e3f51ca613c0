"""Policy losses: per-token losses (B, T) and metrics from new and old log-probs and advantages.

Every loss is called `f(log_probs, old_log_probs, advantages, mask, options...)`, tensors of shape (B, T), and gives
`(loss, metrics)`. The loss is 0 under the mask, in value and gradient, whatever lies there; the caller reduces it with
`aggregate`. Only log_probs is differentiated.

Each metric is a 0-dim mean over the unmasked tokens that were passed. The exact mean over many micro-batches is
therefore the mean of theirs weighted by their numbers of unmasked tokens.

ratio = exp(clip(log_probs - old_log_probs, -20, 20)) throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.learner.algorithms.checks import require_range, require_same_shape
from paceline.learner.algorithms.statistics import full_precision, keep, masked_mean

LOG_RATIO_BOUND = 20.0

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip_c: float | None = None,
) -> LossAndMetrics:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), with the dual clip of arXiv:1912.09729, eq. 5.

    L = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)); with c, where A < 0, min(L, -A c).

    Args:
        log_probs: (B, T), differentiated.
        old_log_probs: (B, T).
        advantages: (B, T).
        mask: (B, T).
        clip_low: in [0, 1].
        clip_high: at least 0; larger than clip_low is DAPO's clip-higher (arXiv:2503.14476).
        dual_clip_c: above 1, or None for no dual clip.

    Returns:
        The loss and `pg_clipfrac` (share of tokens whose clipped term is the larger), `pg_clipfrac_lower` (share where
        the dual bound is the smaller, and A < 0), `ppo_kl` (mean of -(log-ratio)).
    """
    _check_clip(clip_low, clip_high)
    if dual_clip_c is not None:
        require_range("dual_clip_c", dual_clip_c, above=1.0)
    log_ratio, advantages = _prepare(log_probs, old_log_probs, advantages, mask)
    ratio = log_ratio.exp()
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(free, clipped)
    bounded = torch.zeros_like(mask, dtype=torch.bool)
    if dual_clip_c is not None:
        bound = -advantages * dual_clip_c
        bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
    return loss, {
        "pg_clipfrac": _share(clipped > free, mask),
        "pg_clipfrac_lower": _share(bounded, mask),
        "ppo_kl": _ppo_kl(log_ratio, mask),
    }


def _prepare(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """The clipped log-ratio and the advantages, both 0 under the mask."""
    require_same_shape(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, mask=mask)
    log_ratio = keep(log_probs, mask) - keep(old_log_probs.detach(), mask)
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND), keep(advantages.detach(), mask)


def _check_clip(clip_low: float, clip_high: float) -> None:
    require_range("clip_low", clip_low, at_least=0.0, at_most=1.0)
    require_range("clip_high", clip_high, at_least=0.0)


def _share(where: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(full_precision(where), mask)


def _ppo_kl(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(-log_ratio.detach(), mask)
