"""Policy losses: per-token losses (B, T) and metrics from new and old log-probs and advantages.

Every loss is called `f(log_probs, old_log_probs, advantages, mask, options...)`, tensors of shape (B, T), and gives
`(loss, metrics)`. The loss is 0 under the mask, in value and gradient, whatever lies there; the caller reduces it with
`aggregate`. Only log_probs is differentiated.

Each metric is a 0-dim mean over the unmasked tokens that were passed. The exact mean over many micro-batches is
therefore the mean of theirs weighted by their numbers of unmasked tokens.

`kl_cov` and `clip_cov` ask which tokens are the highest of the whole mini-batch. A caller that splits it asks once,
with `covariance.highest_covariance` on the old log-probs, and hands each micro-batch its part as `selected`; left out,
the tokens are chosen among those that are passed. `gspo` and `geo_mean` want whole sequences in a row.

ratio = exp(clip(log_probs - old_log_probs, -20, 20)) throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.learner.algorithms.checks import require_range, require_same_shape
from paceline.learner.algorithms.covariance import highest_covariance
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
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), with the dual clip of arXiv:1912.09729.

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


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> LossAndMetrics:
    """PPO's clip on the ratio of whole sequences (GSPO in its token form, arXiv:2507.18071).

    The value of a token's ratio is that of its sequence, s = exp(mean of the log-ratios), its gradient that of its own
    log-prob: stopgrad(s) pi / stopgrad(pi), the logarithm clamped at 10 from above. Ranges are far smaller than PPO's
    (3e-4 and 4e-4 in the paper), and `seq-mean-token-mean` is the aggregation.

    Arguments, results and metrics as `ppo_clip`; `pg_clipfrac_lower` is always 0.
    """
    _check_clip(clip_low, clip_high)
    log_ratio, advantages = _prepare(log_probs, old_log_probs, advantages, mask)
    sequence = masked_mean(log_ratio.detach(), mask, dim=-1).unsqueeze(-1)
    ratio = torch.clamp(log_ratio - log_ratio.detach() + sequence, max=10.0).exp()
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return keep(torch.maximum(free, clipped), mask), {
        "pg_clipfrac": _share(clipped > free, mask),
        "pg_clipfrac_lower": _share(torch.zeros_like(mask, dtype=torch.bool), mask),
        "ppo_kl": _ppo_kl(log_ratio, mask),
    }


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> LossAndMetrics:
    """REINFORCE weighted by a clipped ratio without gradient: -stopgrad(clip(ratio)) A log pi (arXiv:2506.13585).

    No token loses its gradient, whatever its ratio; a clip_low of 1 leaves the lower side open, as the paper does.
    Arguments and results as `ppo_clip`; `pg_clipfrac` is the share of tokens whose ratio was clipped.
    """
    _check_clip(clip_low, clip_high)
    log_ratio, advantages = _prepare(log_probs, old_log_probs, advantages, mask)
    ratio = log_ratio.detach().exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -clipped * advantages * keep(log_probs, mask), {
        "pg_clipfrac": _share(clipped != ratio, mask),
        "ppo_kl": _ppo_kl(log_ratio, mask),
    }


def gpg(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> LossAndMetrics:
    """-A log pi, plain REINFORCE (GPG, arXiv:2504.02546); old_log_probs serve only the metric `ppo_kl`."""
    log_ratio, advantages = _prepare(log_probs, old_log_probs, advantages, mask)
    return -advantages * keep(log_probs, mask), {"ppo_kl": _ppo_kl(log_ratio, mask)}


def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> LossAndMetrics:
    """A soft gate in place of the clip: -A (4 / tau) sigmoid(tau (ratio - 1)) (SAPO, arXiv:2511.20347).

    At ratio 1 the gradient is that of -A ratio; it fades on both sides, faster for a larger tau.

    Args:
        tau_positive: tau where A > 0; above 0.
        tau_negative: tau elsewhere; above 0, usually the larger.

    The other arguments as `ppo_clip`. Metrics: `ppo_kl`.
    """
    require_range("tau_positive", tau_positive, above=0.0)
    require_range("tau_negative", tau_negative, above=0.0)
    log_ratio, advantages = _prepare(log_probs, old_log_probs, advantages, mask)
    tau = torch.where(advantages > 0, tau_positive, tau_negative).to(log_ratio.dtype)
    gate = (4.0 / tau) * torch.sigmoid(tau * (log_ratio.exp() - 1.0))
    return -advantages * gate, {"ppo_kl": _ppo_kl(log_ratio, mask)}


def geo_mean(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> LossAndMetrics:
    """The geometric mean of a sequence's ratios in place of each one (GMPO, arXiv:2507.20673).

    Each log-ratio is clipped to [-clip_low, clip_high], only on the side to which its advantage drives it; the loss of
    the sequence, -mean(A) exp(mean of the clipped log-ratios), stands on each of its tokens, so that
    `seq-mean-token-mean` gives the mean over sequences.

    Args:
        clip_low: at least 0, in log-ratio (the paper: 0.4).
        clip_high: likewise.

    The other arguments as `ppo_clip`. Metrics: `pg_clipfrac` (share of clipped tokens), `ppo_kl`.
    """
    require_range("clip_low", clip_low, at_least=0.0)
    require_range("clip_high", clip_high, at_least=0.0)
    log_ratio, advantages = _prepare(log_probs, old_log_probs, advantages, mask)
    sign = advantages.sign()
    clipped = sign * log_ratio.clamp(-clip_low, clip_high)
    log_ratio_pessimistic = sign * torch.minimum(sign * log_ratio, clipped)
    ratio = masked_mean(log_ratio_pessimistic, mask, dim=-1).exp()
    loss = -masked_mean(advantages, mask, dim=-1) * ratio
    return keep(loss.unsqueeze(-1).expand(mask.shape), mask), {
        "pg_clipfrac": _share(clipped < sign * log_ratio, mask),
        "ppo_kl": _ppo_kl(log_ratio, mask),
    }


def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cov_fraction: float = 0.0002,
    cov_kl_coef: float = 1.0,
    *,
    selected: Tensor | None = None,
) -> LossAndMetrics:
    """-A ratio, and on the selected tokens also cov_kl_coef |log-ratio| (KL-Cov, arXiv:2505.22617).

    There is no clip; |log-ratio| is the KL term of the authors' code.

    Args:
        log_probs: (B, T), differentiated.
        old_log_probs: (B, T).
        advantages: (B, T).
        mask: (B, T).
        cov_fraction: share of the tokens that are selected, in [0, 1]; at least one token unless it is 0.
        cov_kl_coef: weight of the KL term, at least 0.
        selected: (B, T) booleans from `highest_covariance` over the mini-batch.

    Returns:
        The loss, and `cov_frac` (share of selected tokens), `ppo_kl`.
    """
    require_range("cov_kl_coef", cov_kl_coef, at_least=0.0)
    log_ratio, kept_advantages = _prepare(log_probs, old_log_probs, advantages, mask)
    if selected is None:
        selected = highest_covariance(log_probs, advantages, mask, cov_fraction)
    require_same_shape(mask=mask, selected=selected)
    loss = -kept_advantages * log_ratio.exp() + cov_kl_coef * keep(log_ratio.abs(), selected)
    return keep(loss, mask), {
        "cov_frac": _share(selected, mask),
        "ppo_kl": _ppo_kl(log_ratio, mask),
    }


def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    cov_fraction: float = 0.0002,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    *,
    selected: Tensor | None = None,
) -> LossAndMetrics:
    """`ppo_clip`, with loss and gradient 0 on the selected tokens (Clip-Cov, arXiv:2505.22617).

    The paper draws the tokens at random among those with a covariance in [cov_low, cov_high]; here the highest of
    them are taken, so that a repeated step gives the same numbers.

    Args:
        clip_low: as `ppo_clip`.
        clip_high: as `ppo_clip`.
        cov_fraction: as `kl_cov`.
        cov_low: least covariance of a selected token.
        cov_high: highest covariance of a selected token.
        selected: as `kl_cov`.

    Returns:
        The loss, the metrics of `ppo_clip` and `cov_frac` (share of selected tokens).
    """
    loss, metrics = ppo_clip(log_probs, old_log_probs, advantages, mask, clip_low, clip_high)
    if selected is None:
        selected = highest_covariance(log_probs, advantages, mask, cov_fraction, cov_low, cov_high)
    require_same_shape(mask=mask, selected=selected)
    return keep(loss, ~selected.bool()), {**metrics, "cov_frac": _share(selected, mask)}


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
    """Share of the unmasked tokens where a condition holds, 0-dim."""
    return masked_mean(full_precision(where), mask)


def _ppo_kl(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The metric `ppo_kl`: masked mean of -(log-ratio), 0-dim."""
    return masked_mean(-log_ratio.detach(), mask)
