"""Distills a teacher's likeliest tokens, as the reward service gets them from its server."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from paceline.algorithms.checks import require_range
from paceline.algorithms.policy_losses.base import (
    LossInputs,
    LossOutputs,
    log_ratio_and_advantages,
    ppo_kl,
)
from paceline.algorithms.statistics import masked_mean
from paceline.core.errors import ConfigError


def distill(
    inputs: LossInputs, kl: Literal["reverse", "forward", "jsd"] = "reverse", beta: float = 0.5
) -> LossOutputs:
    """Computes a divergence of policy p and teacher q per token (GKD, arXiv:2306.13649); no reward enters.

    reverse: KL(p || q). forward: KL(q || p). jsd: beta KL(q || m) + (1 - beta) KL(p || m), where
    m = beta q + (1 - beta) p. All are over K + 1 outcomes, so each is at most that over the vocabulary.

    Args:
        inputs: top_k and mask are read; log-probs for `ppo_kl`.
        beta: jsd: the teacher's share of the mixture, in (0, 1).

    Returns:
        The loss, `ppo_kl`, and means of the probability that teacher and policy give to the teacher's K
        tokens (`teacher_top_k_mass`, `policy_top_k_mass`).

    Raises:
        ConfigError: the run has no served teacher.
    """
    if inputs.top_k is None:
        raise ConfigError("the loss distill needs a served teacher; set algorithm.teacher")
    for name, part in (("beta", beta), ("1 - beta", 1.0 - beta)):
        require_range(name, part, above=0.0)
    log_ratio, _ = log_ratio_and_advantages(inputs)
    inside = inputs.mask.bool().unsqueeze(-1)
    log_p = torch.where(inside, inputs.top_k.policy, 0.0)
    log_q = torch.where(inside, inputs.top_k.teacher, 0.0).detach()
    if kl == "reverse":
        loss = _kl(log_p, log_q)
    elif kl == "forward":
        loss = _kl(log_q, log_p)
    else:
        mixture = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
        loss = beta * _kl(log_q, mixture) + (1.0 - beta) * _kl(log_p, mixture)
    masses = {"teacher_top_k_mass": log_q, "policy_top_k_mass": log_p}
    return LossOutputs(
        loss,
        {
            "ppo_kl": ppo_kl(log_ratio, inputs.mask),
            **{
                name: masked_mean(table.detach()[..., :-1].exp().sum(-1), inputs.mask)
                for name, table in masses.items()
            },
        },
    )


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Returns KL(a || b) over the last dimension."""
    return (log_a.exp() * (log_a - log_b)).sum(-1)
