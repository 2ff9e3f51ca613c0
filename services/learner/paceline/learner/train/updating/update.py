"""Updates policy and critic: epochs of mini-batches, one optimizer step per mini-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.algorithms.algorithm import LossFunction
from paceline.algorithms.policy_losses import highest_covariance
from paceline.config.run import RunConfig
from paceline.config.training.actor import ActorConfig
from paceline.config.training.policy_losses import CovarianceLoss
from paceline.core.errors import NumericsError
from paceline.learner.batch.planning.plan import BatchPlan
from paceline.learner.batch.types import Denominators, TrainingBatch
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.decoder.experts import move_corrections
from paceline.learner.model.networks import ValueNetwork
from paceline.learner.train.state.ahead import BegunGradient
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.state.optimizer import Scaling, StepOutcome, Trainable
from paceline.learner.train.updating.losses import PolicyLoss, ValueLoss
from paceline.learner.train.updating.update_guard import UpdateGuard

FIRST_KL_TOLERANCE = 1e-6
"""On policy the first mini-batch's log-ratio is 0; rounding in float32 may change its mean this much."""


def nominal_counts(config: RunConfig) -> Denominators:
    """Returns the counts to divide by while those of the mini-batch are unknown.

    The number of tokens is a power of two, so that dividing by it rounds nothing.
    """
    sequences = config.actor.ppo_mini_batch_size * config.rollout.n
    most = sequences * config.data.max_response_length
    return Denominators(num_tokens=1 << (most - 1).bit_length(), num_sequences=sequences)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MiniBatch:
    """This rank's micro-batches of one optimizer step."""

    parts: tuple[TrainingBatch, ...]
    denominators: Denominators


def cut_mini_batches(
    config: RunConfig, plan: BatchPlan, batches: Sequence[TrainingBatch], ranks: Ranks
) -> dict[str, list[MiniBatch]]:
    """Returns mini-batches of "actor" and "critic"; this rank's micro-batches are in the plan's order."""
    remaining = iter(batches)
    chunks = [[next(remaining) for _ in range(chunk.num_micro_batches)] for chunk in plan.chunks]
    above = config.actor.positive_above
    counts = [torch.stack([_counts(part, above) for part in chunk]).sum(0) for chunk in chunks]
    per_chunk = ranks.data.all_sum(torch.stack(counts)).tolist()

    def cut(num_prompts: int) -> list[MiniBatch]:
        mini_batches = [
            MiniBatch(
                parts=tuple(part for index in indices for part in chunks[index]),
                denominators=Denominators(
                    num_tokens=sum(per_chunk[index][0] for index in indices),
                    num_sequences=sum(per_chunk[index][1] for index in indices),
                    num_positive_tokens=sum(per_chunk[index][2] for index in indices),
                ),
            )
            for indices in plan.mini_batches(num_prompts)
        ]
        # Resampling may leave a mini-batch without rows, on all ranks together.
        return [mini for mini in mini_batches if mini.denominators.num_sequences]

    size = config.actor.ppo_mini_batch_size
    return {"actor": cut(size), "critic": cut(config.critic.ppo_mini_batch_size or size)}


def _counts(part: TrainingBatch, above: float) -> torch.Tensor:
    """Counts tokens, sequences, and tokens of sequences with a score above the bound."""
    mask = part.batch.mask
    return torch.stack([mask.sum(), mask.any(-1).sum(), part.positive_mask(above).sum()])


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
    steps = _OptimizerSteps(
        trainable=actor,
        loss=loss,
        network="actor",
        grad_clip=config.actor.grad_clip,
        guard=guard,
        step=step,
        learner=learner,
        report=report,
        on_taken=partial(move_corrections, actor.network.lm, config.actor.router_bias_update_rate),
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
            metrics = steps.take(parts, counts, begun=begun if is_first else None, scaling=scaling)
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
    steps = _OptimizerSteps(
        trainable=critic,
        loss=ValueLoss(config, critic.network),
        network="critic",
        grad_clip=config.critic.grad_clip,
        guard=guard,
        step=step,
        learner=learner,
        report=report,
    )
    cuts = [list(mini.parts) for mini in mini_batches]
    for _ in range(num_epochs):
        for mini, parts in zip(mini_batches, cuts, strict=True):
            steps.take(parts, mini.denominators)
    return report


def select_tokens(mini: MiniBatch, actor: ActorConfig, ranks: Ranks) -> list[Tensor | None]:
    """Selects a mini-batch's tokens for a covariance loss, a table (B, R) per micro-batch.

    Selects the highest of the mini-batch over all ranks by the old log-probs, so one selection holds for all
    epochs; in float64, so it does not depend on how the mini-batch is cut. None for other losses.
    Every rank calls it.
    """
    loss = actor.policy_loss
    if not isinstance(loss, CovarianceLoss):
        return [None] * len(mini.parts)

    def row(tables: Sequence[Tensor]) -> Tensor:
        return torch.cat([table.flatten() for table in tables]).unsqueeze(0)

    masks = [part.batch.mask for part in mini.parts]
    selected = highest_covariance(
        row([part.log_probs["old"] for part in mini.parts]).double(),
        row([part.advantages for part in mini.parts]).double(),
        row(masks),
        loss.cov_fraction,
        *loss.covariance_band,
        all_reduce=ranks.data.all_sum,
        gather=ranks.data.all_gather,
    )
    pieces = torch.split(selected[0], [mask.numel() for mask in masks])
    return [piece.reshape(mask.shape) for piece, mask in zip(pieces, masks, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _OptimizerSteps:
    """The optimizer steps of one network in a training step.

    Attributes:
        on_taken: called after each step that was taken, with the sums that have no name.
    """

    trainable: Trainable[Any]
    loss: PolicyLoss | ValueLoss
    network: Literal["actor", "critic"]
    grad_clip: float
    guard: UpdateGuard
    step: int
    learner: Learner
    report: UpdateReport
    on_taken: Callable[[Tensor], None] | None = None

    def take(
        self,
        parts: list[TrainingBatch],
        counts: Denominators,
        *,
        begun: BegunGradient | None = None,
        scaling: Scaling | None = None,
    ) -> dict[str, float]:
        """Takes a step on a mini-batch's parts; records and returns its metrics.

        Args:
            counts: what the parts' losses divide by.
        """
        ranks = self.learner.ranks

        def act(parts: Sequence[TrainingBatch]) -> dict[str, float]:
            # An attempt that ran out of memory has dropped the begun gradient.
            num_done, sums = begun.take() if begun is not None else (0, None)
            outcome, sums = self.trainable.update(
                [partial(self.loss, part, counts) for part in parts[num_done:]],
                step=self.step,
                ranks=ranks,
                lr_scale=self.guard.adjustments.lr_scale,
                veto=self._veto,
                begun=sums,
                scaling=scaling,
            )
            return self._note(outcome, sums)

        return self.learner.memory.take(parts, act, ranks=ranks, network=self.network)

    def _veto(self, sums: Tensor, grad_norm: float) -> str:
        names = self.loss.names
        return self.guard.judge_update(self.network, names, sums[: len(names)], grad_norm, self.grad_clip)

    def _note(self, outcome: StepOutcome, sums: Tensor) -> dict[str, float]:
        if not outcome.finite:
            self.guard.note_non_finite(self.network)
        named, counts = sums.tensor_split([len(self.loss.names)])
        metrics = dict(zip(self.loss.names, named.tolist(), strict=True))
        if outcome.taken:
            if self.on_taken is not None:
                self.on_taken(counts)
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
