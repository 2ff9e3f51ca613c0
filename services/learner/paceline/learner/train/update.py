"""The updates of policy and critic: epochs of mini-batches, each one optimizer step with denominators of the whole mini-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.config.run import RunConfig
from paceline.core.errors import NumericsError
from paceline.learner.batch.minibatch import Denominators, MiniBatch
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.networks import PolicyNetwork, ValueNetwork
from paceline.learner.train.advantages import Prepared
from paceline.learner.train.losses import PolicyLoss, ValueLoss
from paceline.learner.train.selection import with_selected_tokens
from paceline.learner.train.trainable import Trainable
from paceline.learner.train.update_guard import NetworkGate, UpdateGate

FIRST_KL_TOLERANCE = 1e-6
"""On policy the first mini-batch's log-ratio is 0; in float32 its mean may be this far off."""


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
    gate: UpdateGate,
) -> UpdateReport:
    """All optimizer steps of the policy in one training step.

    Raises:
        NumericsError: in float32 the first mini-batch's ratio is not 1: old and new log-probs do not come from the same
            weights or the same computation, and every number of the step would be in doubt.
    """
    report = UpdateReport(lr=actor.schedule.at(step) * gate.adjustments.lr_scale)
    if gate.refusal:
        report.skipped += [gate.refusal] * (config.actor.ppo_epochs * len(mini_batches))
        return report
    loss = PolicyLoss(config, actor.network, kl_scale=gate.adjustments.kl_scale)
    judge = NetworkGate(gate=gate, network="actor", names=loss.names, grad_clip=config.actor.grad_clip)
    mini_batches = with_selected_tokens(mini_batches, config.actor, ranks)
    for epoch in range(config.actor.ppo_epochs):
        for number, mini in enumerate(mini_batches):
            metrics = _step(actor, mini, loss, judge, step=step, ranks=ranks, report=report)
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
    gate: UpdateGate,
) -> UpdateReport:
    """All optimizer steps of the critic in one training step."""
    report = UpdateReport(lr=critic.schedule.at(step) * gate.adjustments.lr_scale)
    num_epochs = config.critic.ppo_epochs or config.actor.ppo_epochs
    if gate.refusal:
        report.skipped += [gate.refusal] * (num_epochs * len(mini_batches))
        return report
    loss = ValueLoss(config, critic.network)
    judge = NetworkGate(gate=gate, network="critic", names=loss.names, grad_clip=config.critic.grad_clip)
    for _ in range(num_epochs):
        for mini in mini_batches:
            _step(critic, mini, loss, judge, step=step, ranks=ranks, report=report)
    return report


def _step(
    trainable: Trainable[Any],
    mini: MiniBatch,
    loss: Callable[[Prepared, Denominators], tuple[Tensor, Tensor]],
    judge: NetworkGate,
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
        lr_scale=judge.gate.adjustments.lr_scale,
        veto=judge.veto,
    )
    judge.note(outcome)
    metrics = dict(zip(judge.names, sums.tolist(), strict=True))
    if outcome.taken:
        report.metrics.append(metrics)
        report.grad_norms.append(outcome.grad_norm)
    else:
        report.skipped.append(outcome.skip_reason)
    return metrics


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
