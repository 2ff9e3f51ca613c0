"""Replaces the clip of the ratio by a soft gate."""

from __future__ import annotations

import torch

from paceline.algorithms.checks import require_range
from paceline.algorithms.policy_losses.base import LossInputs, LossOutputs, log_ratio_and_advantages, ppo_kl


def sapo(
    inputs: LossInputs,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> LossOutputs:
    """Replaces the clip by a soft gate: -A (4 / tau) sigmoid(tau (ratio - 1)) (SAPO, arXiv:2511.20347).

    At ratio 1 the gradient is that of -A ratio; it fades on both sides, faster for a larger tau.

    Args:
        tau_positive: tau where A > 0; above 0.
        tau_negative: tau elsewhere; above 0, usually the larger.

    The other arguments as in `ppo_clip`. Metrics: `ppo_kl`.
    """
    require_range("tau_positive", tau_positive, above=0.0)
    require_range("tau_negative", tau_negative, above=0.0)
    log_ratio, advantages = log_ratio_and_advantages(inputs)
    mask = inputs.mask
    tau = torch.where(advantages > 0, tau_positive, tau_negative).to(log_ratio.dtype)
    gate = (4.0 / tau) * torch.sigmoid(tau * (log_ratio.exp() - 1.0))
    return LossOutputs(-advantages * gate, {"ppo_kl": ppo_kl(log_ratio, mask)})
