"""Shared parts of the losses: inputs and outputs, the clipped log-ratio, and common metrics.

ratio = exp(clip(log_probs - old_log_probs, -20, 20)) throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from paceline.algorithms.checks import require_range, require_same_shape
from paceline.algorithms.policy_losses.top_k import TopK
from paceline.algorithms.statistics import full_precision, keep, masked_mean

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossInputs:
    """The inputs of a policy loss: a micro-batch of B complete sequences and T response positions.

    Only `log_probs` and `top_k.policy` are differentiated. Masked entries are undefined.

    Attributes:
        log_probs: (B, T), the policy's log-probs, with their graph.
        log_probs_of: (B, T) each, by name: "old", the policy's before the step's first update; "rollout", the
            sampler's; "reference", if a KL to it is used; each frozen network's by its name.
        advantages: (B, T).
        mask: (B, T) booleans, True on the tokens that the policy produced.
        scores: (B,), each sequence's reward with the overlong penalty, without a KL.
        group_ids: (B,) integers, equal for samples of one prompt, on all ranks and in all micro-batches.
        values: (B, T), the critic's values before the step's first update; None without a critic.
        selected: (B, T) booleans, the tokens that `highest_covariance` selected over the mini-batch; None
            unless `actor.policy_loss` is a covariance loss.
        top_k: what policy and served teacher say about the teacher's likeliest tokens; None without
            `algorithm.teacher`.
    """

    log_probs: Tensor
    log_probs_of: Mapping[str, Tensor]
    advantages: Tensor
    mask: Tensor
    scores: Tensor | None = None
    group_ids: Tensor | None = None
    values: Tensor | None = None
    selected: Tensor | None = None
    top_k: TopK | None = None

    @property
    def old_log_probs(self) -> Tensor:
        """The policy's log-probs before the step's first update, (B, T)."""
        return self.log_probs_of["old"]

    @property
    def rollout_log_probs(self) -> Tensor | None:
        """The sampler's log-probs of its tokens, (B, T), in nats."""
        return self.log_probs_of.get("rollout")

    @property
    def ref_log_probs(self) -> Tensor | None:
        """The reference model's log-probs, (B, T); None unless a KL to it is in use."""
        return self.log_probs_of.get("reference")


class LossOutputs(NamedTuple):
    """What a policy loss returns.

    Attributes:
        loss: (B, T) per-token losses; the caller reduces them with `aggregate`, which ignores masked
            entries.
        metrics: 0-dim means over the unmasked tokens of these inputs, by name. Over several micro-batches,
            means are weighted by the numbers of unmasked tokens.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor] = {}


def log_ratio_and_advantages(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Returns the clipped log-ratio, with its graph, and the advantages; both (B, T) and 0 under the mask.

    Raises:
        NumericsError: shapes differ.
    """
    mask = inputs.mask
    require_same_shape(
        log_probs=inputs.log_probs,
        old_log_probs=inputs.old_log_probs,
        advantages=inputs.advantages,
        mask=mask,
    )
    log_ratio = keep(inputs.log_probs, mask) - keep(inputs.old_log_probs.detach(), mask)
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND), keep(inputs.advantages.detach(), mask)


def check_clip(clip_low: float, clip_high: float) -> None:
    """Raises ConfigError unless 1 - clip_low and 1 + clip_high are bounds of a ratio."""
    require_range("clip_low", clip_low, at_least=0.0, at_most=1.0)
    require_range("clip_high", clip_high, at_least=0.0)


def share(where: Tensor, mask: Tensor) -> Tensor:
    """Returns the share of unmasked tokens for which a condition holds, 0-dim."""
    return masked_mean(full_precision(where), mask)


def ppo_kl(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Returns the metric `ppo_kl`: masked mean of -(log-ratio), 0-dim."""
    return masked_mean(-log_ratio.detach(), mask)
