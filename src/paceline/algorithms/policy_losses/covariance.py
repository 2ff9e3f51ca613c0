"""Selects tokens with a high covariance of log-prob and advantage, and treats them separately.

The covariance of a token is (log pi - mean log pi) (A - mean A), with the means over the batch: updates on
tokens with a high covariance reduce the entropy most (arXiv:2505.22617).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.algorithms.checks import require_range, require_same_shape
from paceline.algorithms.policy_losses.base import (
    LossInputs,
    LossOutputs,
    log_ratio_and_advantages,
    ppo_kl,
    share,
)
from paceline.algorithms.policy_losses.clipped_ratio import ppo_clip
from paceline.algorithms.statistics import AllReduce, keep, masked_sums, mean_from_sums


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
    """Selects the tokens with the highest covariance of a batch that may be spread over ranks.

    Args:
        log_probs: (B, T), this rank's rows.
        advantages: (B, T).
        mask: (B, T).
        cov_fraction: share of all ranks' tokens, in [0, 1]; 0 selects none, any other share at least one.
        cov_low: tokens below are not selected.
        cov_high: tokens above are not selected.
        all_reduce: adds a small 1-D tensor over all ranks.
        gather: concatenates the ranks' 1-D tensors, all of one length.

    Returns:
        (B, T) booleans. A tie at the last place selects all tied tokens.
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
    # All selected tokens may be on one rank, so each rank offers that many; lengths must be equal.
    offer = flat.new_full((number,), -torch.inf)
    highest = flat.topk(min(number, flat.numel())).values
    offer[: highest.numel()] = highest
    last = gather(offer).topk(number).values[-1]
    return eligible & (covariance >= last)


def kl_cov(
    inputs: LossInputs,
    cov_fraction: float = 0.0002,
    cov_kl_coef: float = 1.0,
) -> LossOutputs:
    """Returns -A ratio, plus cov_kl_coef |log-ratio| on selected tokens (KL-Cov, arXiv:2505.22617).

    There is no clip; |log-ratio| is the KL term of the authors' code.

    Args:
        inputs: log_probs, old_log_probs, advantages and mask are read.
        cov_fraction: share of the tokens that are selected, in [0, 1]; at least one token unless it is 0.
        cov_kl_coef: weight of the KL term, at least 0.

    Returns:
        The loss, and `cov_frac` (share of selected tokens), `ppo_kl`.
    """
    require_range("cov_kl_coef", cov_kl_coef, at_least=0.0)
    log_ratio, advantages = log_ratio_and_advantages(inputs)
    mask, selected = inputs.mask, _selected(inputs, cov_fraction)
    loss = -advantages * log_ratio.exp() + cov_kl_coef * keep(log_ratio.abs(), selected)
    return LossOutputs(
        keep(loss, mask),
        {
            "cov_frac": share(selected, mask),
            "ppo_kl": ppo_kl(log_ratio, mask),
        },
    )


def clip_cov(
    inputs: LossInputs,
    clip_low: float,
    clip_high: float,
    cov_fraction: float = 0.0002,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> LossOutputs:
    """Applies `ppo_clip`, with loss and gradient 0 on selected tokens (Clip-Cov, arXiv:2505.22617).

    The paper draws the tokens at random among those with a covariance in [cov_low, cov_high]; this function
    takes the highest of them, so that a repeated step gives the same numbers.

    Args:
        clip_low: as in `ppo_clip`.
        clip_high: as in `ppo_clip`.
        cov_fraction: as in `kl_cov`.
        cov_low: lowest covariance of a selected token.
        cov_high: highest covariance of a selected token.

    Returns:
        The loss, the metrics of `ppo_clip` and `cov_frac` (share of selected tokens).
    """
    loss, metrics = ppo_clip(inputs, clip_low, clip_high)
    selected = _selected(inputs, cov_fraction, cov_low, cov_high)
    return LossOutputs(keep(loss, ~selected.bool()), {**metrics, "cov_frac": share(selected, inputs.mask)})


def _selected(inputs: LossInputs, *choice: float) -> Tensor:
    """Returns the tokens that the caller has selected, or else selects among these inputs."""
    if inputs.selected is None:
        return highest_covariance(inputs.log_probs, inputs.advantages, inputs.mask, *choice)
    require_same_shape(mask=inputs.mask, selected=inputs.selected)
    return inputs.selected
