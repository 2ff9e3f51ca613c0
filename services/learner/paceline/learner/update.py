"""The updates of policy and critic: epochs of mini-batches, each one optimizer step with denominators of the whole mini-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.config.actor import ActorConfig
from paceline.config.run import RunConfig
from paceline.core.errors import NumericsError
from paceline.learner.advantage_step import Prepared
from paceline.learner.algorithms import kl, registry
from paceline.learner.algorithms.aggregation import aggregate
from paceline.learner.algorithms.statistics import masked_sum
from paceline.learner.algorithms.value_losses import clipped_value_loss
from paceline.learner.models import PolicyNetwork, ValueNetwork
from paceline.learner.packing import MicroBatch
from paceline.learner.ranks import Ranks
from paceline.learner.trainable import Trainable

FIRST_KL_TOLERANCE = 1e-6
"""On policy the first mini-batch's log-ratio is 0; in float32 its mean may be this far off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Denominators:
    """Counts of one mini-batch over all ranks."""

    num_tokens: int
    num_sequences: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MiniBatch:
    """This rank's micro-batches of one optimizer step."""

    parts: tuple[Prepared, ...]
    denominators: Denominators


@dataclass(kw_only=True, slots=True)
class UpdateReport:
    """What the optimizer steps of one network said, step by step."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    lr: float = 0.0

    def summary(self, prefix: str) -> dict[str, float]:
        """Means over the mini-batches, under `prefix`; norms that are not finite are left to `skipped_updates`."""
        names = self.metrics[0].keys() if self.metrics else ()
        means = {f"{prefix}{name}": _mean([one[name] for one in self.metrics]) for name in names}
        return means | {
            f"{prefix}grad_norm": _mean(self.grad_norms),
            f"{prefix}lr": self.lr,
            f"{prefix}skipped_updates": float(len(self.skipped)),
        }


def update_policy(
    actor: Trainable[PolicyNetwork],
    mini_batches: Sequence[MiniBatch],
    config: RunConfig,
    *,
    step: int,
    ranks: Ranks,
) -> UpdateReport:
    """All optimizer steps of the policy in one training step.

    Raises:
        NumericsError: in float32 the first mini-batch's ratio is not 1: old and new log-probs do not come from the same
            weights or the same computation, and every number of the step would be in doubt.
    """
    report = UpdateReport(lr=actor.schedule.at(step))
    loss = PolicyLoss(config, actor.network)
    for epoch in range(config.actor.ppo_epochs):
        for number, mini in enumerate(mini_batches):
            metrics = _step(actor, mini, loss, loss.names, step=step, ranks=ranks, report=report)
            if epoch == number == 0:
                _check_first(metrics, config)
    return report


def update_critic(
    critic: Trainable[ValueNetwork],
    mini_batches: Sequence[MiniBatch],
    config: RunConfig,
    *,
    step: int,
    ranks: Ranks,
) -> UpdateReport:
    """All optimizer steps of the critic in one training step."""
    report = UpdateReport(lr=critic.schedule.at(step))

    def loss(part: Prepared, whole: Denominators) -> tuple[Tensor, Tensor]:
        batch = part.batch
        assert part.values is not None and part.returns is not None  # noqa: PT018  a critic has made them
        values = batch.table(critic.network(batch))
        per_token, found = clipped_value_loss(
            values, part.values, part.returns, batch.mask, config.critic.vf_clip_param
        )
        total = aggregate(per_token, batch.mask, "token-mean", num_tokens=whole.num_tokens)
        return total, _sums(total, batch, found, ("vf_clipfrac",), whole)

    for _ in range(config.critic.ppo_epochs or config.actor.ppo_epochs):
        for mini in mini_batches:
            _step(critic, mini, loss, ("vf_loss", "vf_clipfrac"), step=step, ranks=ranks, report=report)
    return report


class PolicyLoss:
    """The policy's loss on one micro-batch, as a share of the mini-batch's.

    `names` are those of the vector of sums that comes with it: the whole loss, then the metrics.
    """

    def __init__(self, config: RunConfig, network: PolicyNetwork) -> None:
        self._network, self._actor = network, config.actor
        self._temperature = config.rollout.temperature
        self._constant = config.actor.loss_agg_constant or float(config.data.max_response_length)
        self._function = registry.policy_loss(config.actor.policy_loss)
        self._options = registry.select_options(self._function, _loss_options(config.actor))
        self._token_metrics = ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy")
        self.names = ("loss", *self._token_metrics, "pg_loss", "kl_loss")

    def __call__(self, part: Prepared, whole: Denominators) -> tuple[Tensor, Tensor]:
        """The share, with its graph, and the sums."""
        batch = part.batch
        flat, flat_entropy = self._network(batch, self._temperature, True)
        log_probs = batch.table(flat)
        per_token, found = self._function(
            log_probs, part.old_log_probs, part.advantages, batch.mask, **self._options
        )
        total = pg_loss = self._aggregate(per_token, batch, whole)
        assert flat_entropy is not None
        entropy = batch.table(flat_entropy if self._actor.entropy_coeff else flat_entropy.detach())
        if self._actor.entropy_coeff:
            total = total - self._actor.entropy_coeff * self._aggregate(entropy, batch, whole)
        kl_loss = torch.zeros_like(pg_loss)
        if self._actor.use_kl_loss and part.ref_log_probs is not None:
            estimate = kl.kl_estimate(log_probs, part.ref_log_probs, self._actor.kl_loss_type)
            kl_loss = self._aggregate(estimate, batch, whole)
            total = total + self._actor.kl_loss_coef * kl_loss
        means = {**found, "entropy": _mean_of(entropy.detach(), batch)}
        sums = _sums(total, batch, means, self._token_metrics, whole)
        return total, torch.cat([sums, torch.stack([pg_loss, kl_loss]).detach().double()])

    def _aggregate(self, per_token: Tensor, batch: MicroBatch, whole: Denominators) -> Tensor:
        return aggregate(
            per_token,
            batch.mask,
            self._actor.loss_agg_mode,
            num_tokens=whole.num_tokens,
            num_sequences=whole.num_sequences,
            constant=self._constant,
        )


def _loss_options(actor: ActorConfig) -> dict[str, Any]:
    return {
        "clip_low": actor.clip_low,
        "clip_high": actor.clip_high,
        "dual_clip_c": actor.clip_ratio_c if actor.use_dual_clip else None,
    }


def _step(
    trainable: Trainable[Any],
    mini: MiniBatch,
    loss: Callable[[Prepared, Denominators], tuple[Tensor, Tensor]],
    names: Sequence[str],
    *,
    step: int,
    ranks: Ranks,
    report: UpdateReport,
) -> dict[str, float]:
    parts = {id(part.batch): part for part in mini.parts}
    outcome, sums = trainable.update(
        [part.batch for part in mini.parts],
        lambda batch: loss(parts[id(batch)], mini.denominators),
        step=step,
        ranks=ranks,
    )
    metrics = dict(zip(names, sums.tolist(), strict=True))
    if outcome.taken:
        report.metrics.append(metrics)
        report.grad_norms.append(outcome.grad_norm)
    else:
        report.skipped.append(outcome.skip_reason)
    return metrics


def _sums(
    total: Tensor, batch: MicroBatch, means: Mapping[str, Tensor], names: Sequence[str], whole: Denominators
) -> Tensor:
    """[loss, then each metric's share of the mini-batch's token mean], float64."""
    share = batch.mask.sum().double() / whole.num_tokens
    zero = share.new_zeros(())
    # A loss without such a metric (no clip, say) reports 0.
    return torch.stack([total.detach().double(), *(means.get(name, zero).double() * share for name in names)])


def _mean_of(table: Tensor, batch: MicroBatch) -> Tensor:
    return masked_sum(table, batch.mask) / batch.mask.sum().clamp(min=1)


def _check_first(metrics: Mapping[str, float], config: RunConfig) -> None:
    """A loss that is not finite is the optimizer's business, which skips it."""
    ratio_off = abs(metrics["ppo_kl"]) > FIRST_KL_TOLERANCE or metrics["pg_clipfrac"] > FIRST_KL_TOLERANCE
    if config.model.dtype == "float32" and math.isfinite(metrics["loss"]) and ratio_off:
        raise NumericsError(
            f"the first mini-batch must be exactly on policy, but ppo_kl={metrics['ppo_kl']:g} and "
            f"pg_clipfrac={metrics['pg_clipfrac']:g}: old and new log-probs were not computed alike"
        )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
