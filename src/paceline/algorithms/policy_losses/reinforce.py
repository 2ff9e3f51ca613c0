"""Computes REINFORCE, plain and with a detached weight on each token."""

from __future__ import annotations

from paceline.algorithms.policy_losses.base import (
    LossInputs,
    LossOutputs,
    check_clip,
    log_ratio_and_advantages,
    ppo_kl,
    share,
)
from paceline.algorithms.statistics import keep


def gpg(inputs: LossInputs) -> LossOutputs:
    """Returns -A log pi, plain REINFORCE (GPG, arXiv:2504.02546); only `ppo_kl` reads old_log_probs."""
    log_ratio, advantages = log_ratio_and_advantages(inputs)
    mask = inputs.mask
    return LossOutputs(-advantages * keep(inputs.log_probs, mask), {"ppo_kl": ppo_kl(log_ratio, mask)})


def cispo(
    inputs: LossInputs,
    clip_low: float,
    clip_high: float,
) -> LossOutputs:
    """Returns -stopgrad(clip(ratio)) A log pi: REINFORCE with a clipped weight (CISPO, arXiv:2506.13585).

    Every token keeps its gradient at any ratio; clip_low = 1 means no lower bound, as in the paper. Arguments
    and results as in `ppo_clip`; `pg_clipfrac` is the share of tokens whose ratio was clipped.
    """
    check_clip(clip_low, clip_high)
    log_ratio, advantages = log_ratio_and_advantages(inputs)
    mask = inputs.mask
    ratio = log_ratio.detach().exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return LossOutputs(
        -clipped * advantages * keep(inputs.log_probs, mask),
        {
            "pg_clipfrac": share(clipped != ratio, mask),
            "ppo_kl": ppo_kl(log_ratio, mask),
        },
    )
