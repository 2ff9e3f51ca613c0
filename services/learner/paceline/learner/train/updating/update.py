"""Updates policy and critic: epochs of mini-batches, one optimizer step per mini-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from paceline.algorithms.algorithm import LossFunction
from paceline.config.run import RunConfig
from paceline.core.errors import NumericsError
from paceline.learner.batch.minibatch import Denominators, MiniBatch, nominal_counts
from paceline.learner.batch.types import TrainingBatch
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.networks import ValueNetwork
from paceline.learner.train.state.ahead import BegunGradient
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.state.memory import MemoryRoom
from paceline.learner.train.state.optimizer import PartLoss, Scaling, StepOutcome, Trainable
from paceline.learner.train.updating.losses import PolicyLoss, ValueLoss, select_tokens
from paceline.learner.train.updating.update_guard import NetworkGuard, UpdateGuard

FIRST_KL_TOLERANCE = 1e-6
"""On policy the first mini-batch's log-ratio is 0; rounding in float32 may change its mean this much."""


@dataclass(kw_only=True, slots=True)
class UpdateReport:
    """The optimizer steps of one network in a training step."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    lr: float = 0.0

    def summary(self, prefix: str) -> dict[str, float]:
        """Returns means over the steps taken, under `prefix`, and the number of skipped steps."""
        names = self.metrics[0].keys() if self.metrics else ()
        means = {f"{prefix}{name}": _mean([metrics[name] for metrics in self.metrics]) for name in names}
        return means | {
            f"{prefix}grad_norm": _mean(self.grad_norms),
            f"{prefix}lr": self.lr,
            f"{prefix}skipped_updates": float(len(self.skipped)),
        }


def update_policy(
    learner: Learner,
    mini_batches: Sequence[MiniBatch],
    guard: UpdateGuard,
    loss_function: LossFunction,
    *,
    step: int,
    begun: BegunGradient | None = None,
) -> UpdateReport:
    """Takes all optimizer steps of the policy in one training step; every rank calls it.

    Args:
        begun: the part of the first mini-batch's gradient that was computed ahead.

    Raises:
        NumericsError: in float32 the first mini-batch's ratio is not 1, so old and new log-probs come from
            different weights or different computations; no number of the step could be trusted.
    """
    actor, config, ranks = learner.actor, learner.config, learner.ranks
    report = UpdateReport(lr=actor.schedule.at(step) * guard.adjustments.lr_scale)
    if guard.refusal:
        report.skipped += [guard.refusal] * (config.actor.ppo_epochs * len(mini_batches))
        return report
    loss = PolicyLoss(config, actor.network, guard.adjustments, loss_function)
    network_guard = NetworkGuard(
        guard=guard, network="actor", names=loss.names, grad_clip=config.actor.grad_clip
    )
    steps = _OptimizerSteps(
        trainable=actor, guard=network_guard, step=step, ranks=ranks, memory=learner.memory, report=report
    )
    cuts = [
        [
            replace(part, selected=selected)
            for part, selected in zip(mini.parts, select_tokens(mini, config.actor, ranks), strict=True)
        ]
        for mini in mini_batches
    ]
    for epoch in range(config.actor.ppo_epochs):
        for number, (mini, parts) in enumerate(zip(mini_batches, cuts, strict=True)):
            is_first, counts, scaling = epoch == number == 0, mini.denominators, None
            if is_first and config.barrier.work_ahead == "gradients":
                # These counts do not depend on whether the gradient was begun ahead.
                counts = nominal_counts(config)
                scaling = loss.scaling(counts, mini.denominators)

            def on(part: TrainingBatch, counts: Denominators = counts) -> PartLoss:
                return partial(loss, part, counts)

            metrics = steps.take(parts, on, begun=begun if is_first else None, scaling=scaling)
            if is_first:
                _check_first(metrics, config)
    return report


def update_critic(
    learner: Learner,
    critic: Trainable[ValueNetwork],
    mini_batches: Sequence[MiniBatch],
    guard: UpdateGuard,
    *,
    step: int,
) -> UpdateReport:
    """Takes all optimizer steps of the critic in one training step; every rank calls it."""
    config = learner.config
    report = UpdateReport(lr=critic.schedule.at(step) * guard.adjustments.lr_scale)
    num_epochs = config.critic.ppo_epochs or config.actor.ppo_epochs
    if guard.refusal:
        report.skipped += [guard.refusal] * (num_epochs * len(mini_batches))
        return report
    loss = ValueLoss(config, critic.network)
    network_guard = NetworkGuard(
        guard=guard, network="critic", names=loss.names, grad_clip=config.critic.grad_clip
    )
    steps = _OptimizerSteps(
        trainable=critic,
        guard=network_guard,
        step=step,
        ranks=learner.ranks,
        memory=learner.memory,
        report=report,
    )
    cuts = [list(mini.parts) for mini in mini_batches]
    for _ in range(num_epochs):
        for mini, parts in zip(mini_batches, cuts, strict=True):

            def on(part: TrainingBatch, counts: Denominators = mini.denominators) -> PartLoss:
                return partial(loss, part, counts)

            steps.take(parts, on)
    return report


@dataclass(frozen=True, kw_only=True, slots=True)
class _OptimizerSteps:
    """The optimizer steps of one network in a training step."""

    trainable: Trainable[Any]
    guard: NetworkGuard
    step: int
    ranks: Ranks
    memory: MemoryRoom
    report: UpdateReport

    def take(
        self,
        parts: list[TrainingBatch],
        loss_on: Callable[[TrainingBatch], PartLoss],
        *,
        begun: BegunGradient | None = None,
        scaling: Scaling | None = None,
    ) -> dict[str, float]:
        """Takes a step on a mini-batch's parts; records and returns its metrics."""

        def act(parts: Sequence[TrainingBatch]) -> dict[str, float]:
            # An attempt that ran out of memory has dropped the begun gradient.
            num_done, sums = begun.take() if begun is not None else (0, None)
            outcome, sums = self.trainable.update(
                [loss_on(part) for part in parts[num_done:]],
                step=self.step,
                ranks=self.ranks,
                lr_scale=self.guard.guard.adjustments.lr_scale,
                veto=self.guard.veto,
                begun=sums,
                scaling=scaling,
            )
            return self._note(outcome, sums)

        return self.memory.take(parts, act, ranks=self.ranks, network=self.guard.network)

    def _note(self, outcome: StepOutcome, sums: Tensor) -> dict[str, float]:
        self.guard.note(outcome)
        metrics = dict(zip(self.guard.names, sums.tolist(), strict=True))
        if outcome.taken:
            self.report.metrics.append(metrics)
            self.report.grad_norms.append(outcome.grad_norm)
        else:
            self.report.skipped.append(outcome.skip_reason)
        return metrics


def _check_first(metrics: Mapping[str, float], config: RunConfig) -> None:
    """Checks that the ratio is 1. Losses that are not finite pass, because the optimizer skips them."""
    ratio_off = abs(metrics["ppo_kl"]) > FIRST_KL_TOLERANCE or metrics["pg_clipfrac"] > FIRST_KL_TOLERANCE
    if config.model.dtype == "float32" and math.isfinite(metrics["loss"]) and ratio_off:
        raise NumericsError(
            f"the first mini-batch must be exactly on policy, but ppo_kl={metrics['ppo_kl']:g} and "
            f"pg_clipfrac={metrics['pg_clipfrac']:g}: old and new log-probs were not computed alike"
        )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
