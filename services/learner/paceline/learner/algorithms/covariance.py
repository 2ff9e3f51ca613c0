"""Which tokens have the highest covariance of log-prob and advantage, over a mini-batch that may be split.

The covariance of a token is (log pi - mean log pi) (A - mean A), with the means over the batch: raising the log-prob of
tokens where it is high is what uses up the entropy (arXiv:2505.22617).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.learner.algorithms.checks import require_range, require_same_shape
from paceline.learner.algorithms.statistics import AllReduce, keep, masked_sums, mean_from_sums


def highest_covariance(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cov_fraction: float,
    cov_low: float = -torch.inf,
    cov_high: float = torch.inf,
    *,
    all_reduce: AllReduce = lambda sums: sums,
    gather: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> Tensor:
    """The tokens with the highest covariance over a batch that may lie on several ranks.

    Args:
        log_probs: (B, T), this rank's rows.
        advantages: (B, T).
        mask: (B, T).
        cov_fraction: share of all ranks' tokens, in [0, 1]; 0 selects none, anything above at least one.
        cov_low: tokens below are not selected.
        cov_high: tokens above are not selected.
        all_reduce: adds a small 1-D tensor over all ranks.
        gather: gives every rank's 1-D tensors (all of one length) in one.

    Returns:
        (B, T) booleans. A tie at the last place selects all that tie.
    """
    require_range("cov_fraction", cov_fraction, at_least=0.0, at_most=1.0)
    require_same_shape(log_probs=log_probs, advantages=advantages, mask=mask)
    kept = mask.bool()
    log_probs, advantages = keep(log_probs.detach(), mask), keep(advantages.detach(), mask)
    log_prob_sum, count = all_reduce(masked_sums(log_probs, mask)).unbind()
    advantage_sum, _ = all_reduce(masked_sums(advantages, mask)).unbind()
    number = min(max(int(count.item() * cov_fraction), 1), int(count.item()))
    if cov_fraction == 0.0 or number == 0:
        return torch.zeros_like(kept)
    covariance = (log_probs - mean_from_sums(log_prob_sum, count)) * (
        advantages - mean_from_sums(advantage_sum, count)
    )
    eligible = kept & (covariance >= cov_low) & (covariance <= cov_high)
    flat = covariance.masked_fill(~eligible, -torch.inf).flatten()
    # Every rank offers as many as could all be its own; short ones are filled up, since gathers want one length.
    offer = flat.new_full((number,), -torch.inf)
    mine = flat.topk(min(number, flat.numel())).values
    offer[: mine.numel()] = mine
    last = gather(offer).topk(number).values[-1]
    return eligible & (covariance >= last)
