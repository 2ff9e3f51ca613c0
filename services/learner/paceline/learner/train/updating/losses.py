"""Computes the losses of policy and critic on a micro-batch, as shares of the mini-batch's loss.

Shares add up over micro-batches and ranks. A loss takes a micro-batch and the counts of its mini-batch, and
returns the share with its graph and a vector of sums for the metrics `names`, the loss first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.algorithms import kl
from paceline.algorithms.aggregation import TOKEN_MEAN, aggregate
from paceline.algorithms.algorithm import LossFunction
from paceline.algorithms.policy_losses.base import (
    LossInputs,
    log_ratio_and_advantages,
    ppo_kl,
)
from paceline.algorithms.policy_losses.top_k import TopK, log_rest
from paceline.algorithms.statistics import masked_sum
from paceline.algorithms.value_losses import clipped_value_loss
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError, NumericsError
from paceline.core.guard import Adjustments
from paceline.learner.batch.types import Denominators, MicroBatch, PackedTeacher, TrainingBatch
from paceline.learner.model.decoder.experts import balance_by_row, num_choices, recorded_choices, routers
from paceline.learner.model.decoder.router_replay import changes_by_token
from paceline.learner.model.networks import PolicyNetwork, TokenScores, ValueNetwork
from paceline.learner.train.algorithm import metric_names
from paceline.learner.train.state.optimizer import Scaling

STANDARD_METRICS = ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy")
"""Token means that every policy loss reports; 0 if a loss has no such metric, as without a clip."""


REPLAY_METRICS = ("router_replay_changed", "router_replay_missing")
"""Token means with `actor.router_replay`, as `changes_by_token` returns them."""


class PolicyLoss:
    """The policy's loss on one micro-batch, as a share of the mini-batch's.

    `names` are the names of the sums: the loss, then the metrics, including the policy loss's own. With
    `actor.router_bias_update_rate`, how often each expert was chosen comes after them.

    Args:
        adjustments: the guard's adjustments, here of actor.kl_loss_coef.
        loss: the algorithm's loss, with the guard's adjustments of the clip range.
    """

    def __init__(
        self, config: RunConfig, network: PolicyNetwork, adjustments: Adjustments, loss: LossFunction
    ) -> None:
        self._network, self._actor, self._loss = network, config.actor, loss
        self._kl_loss_coef = config.actor.kl_loss_coef * adjustments.kl_scale
        self._temperature = config.rollout.temperature
        self._has_teacher = config.algorithm.teacher is not None
        self._is_corrected = config.rollout_correction.method != "none"
        self._constant = config.actor.loss_agg_constant or float(config.data.max_response_length)
        self._metrics = metric_names(config, loss)
        own = [name for name in self._metrics if name not in STANDARD_METRICS]
        own += REPLAY_METRICS if network.replaying else ()
        self._token_metrics = (*STANDARD_METRICS, *own)
        self._num_routers = len(routers(network.lm))
        self._counts_choices = bool(self._actor.router_bias_update_rate)
        balance = ("load_balance",) if self._num_routers else ()
        positive = ("positive_loss",) if self._actor.positive_loss_coef else ()
        self.names = ("loss", *self._token_metrics, "pg_loss", "kl_loss", *positive, *balance)

    def __call__(self, part: TrainingBatch, denominators: Denominators) -> tuple[Tensor, Tensor]:
        """Returns the share, with its graph, and the sums."""
        batch, device = part.batch, part.batch.mask.device
        self._require_tables(part)
        teacher = None
        if self._has_teacher:
            teacher = batch.teacher or PackedTeacher.nothing(len(batch.targets))
        ids = None if teacher is None else teacher.token_ids.to(device, non_blocking=True).long()
        with recorded_choices(self._network.lm) as choices:
            scores: TokenScores = self._network(batch, self._temperature, True, ids)
        log_probs, flat_entropy = batch.table(scores.log_probs), scores.entropy
        per_token, metrics = self._per_token(log_probs, part, _top_k(batch, scores, teacher))
        if part.weights is not None:
            per_token = per_token * part.weights
        total = pg_loss = self._aggregate(per_token, batch, denominators)
        assert flat_entropy is not None
        entropy = batch.table(flat_entropy if self._actor.entropy_coeff else flat_entropy.detach())
        if self._actor.entropy_coeff:
            total = total - self._actor.entropy_coeff * self._aggregate(entropy, batch, denominators)
        kl_loss = torch.zeros_like(pg_loss)
        if self._actor.use_kl_loss:
            estimate = kl.kl_estimate(log_probs, part.log_probs["reference"], self._actor.kl_loss_type)
            kl_loss = self._aggregate(estimate, batch, denominators)
            total = total + self._kl_loss_coef * kl_loss
        extra = [pg_loss, kl_loss]
        if self._actor.positive_loss_coef:
            mask = part.positive_mask(self._actor.positive_above)
            # The share of the mini-batch's mean over tokens of correct responses; 0 without any.
            positive = -log_probs.where(mask, 0.0).sum() / max(1, denominators.num_positive_tokens)
            total = total + self._actor.positive_loss_coef * positive
            extra.append(positive)
        if self._num_routers:
            balance = self._load_balance(choices, batch, denominators)
            total = total + self._actor.load_balance_coef * balance
            extra.append(balance)
        means = {**metrics, "entropy": _mean_of(entropy.detach(), batch), **self._replay_means(batch)}
        sums = _sums(total, batch, means, self._token_metrics, denominators)
        counts = [num_choices(choices, batch, self._network.context)] if self._counts_choices else []
        return total, torch.cat([sums, torch.stack(extra).detach().double(), *counts])

    def scaling(self, counted: Denominators, actual: Denominators) -> Scaling:
        """Returns the scaling from shares with counts `counted` to shares with counts `actual`."""
        per_token = counted.num_tokens / actual.num_tokens
        per_sequence = counted.num_sequences / actual.num_sequences
        loss = per_token if self._actor.aggregation == TOKEN_MEAN else per_sequence
        factors = dict.fromkeys(self.names, loss) | dict.fromkeys(self._token_metrics, per_token)
        if self._num_routers:
            factors["load_balance"] = per_sequence
        return Scaling(
            gradient=loss, sums=torch.tensor([factors[name] for name in self.names], dtype=torch.float64)
        )

    def _require_tables(self, part: TrainingBatch) -> None:
        """Raises NumericsError if a micro-batch lacks a table; a rank would silently omit a term."""
        needed = {
            "reference log-probs": (self._actor.use_kl_loss, part.log_probs.get("reference")),
            "weights": (self._is_corrected, part.weights),
            "teacher's tokens": (self._has_teacher and bool(part.batch.sources), part.batch.teacher),
        }
        for name, (is_needed, table) in needed.items():
            if is_needed and table is None:
                raise NumericsError(
                    f"a micro-batch of rows {list(part.batch.rows)[:8]} has no {name}, which the policy loss "
                    "reads; without them its gradient would be wrong; report this as a bug"
                )

    def _replay_means(self, batch: MicroBatch) -> dict[str, Tensor]:
        """Returns REPLAY_METRICS of the last pass; {} without a replay."""
        replaying = self._network.replaying
        if not replaying:
            return {}
        flat = changes_by_token(replaying, batch, self._network.context)
        tables = (batch.table(part) for part in flat)
        return {name: _mean_of(table, batch) for name, table in zip(REPLAY_METRICS, tables, strict=True)}

    def _load_balance(
        self, choices: Sequence[tuple[Tensor, Tensor]], batch: MicroBatch, denominators: Denominators
    ) -> Tensor:
        """Returns the share of the mini-batch's mean over its sequences.

        Raises:
            NumericsError: a router did not record its choices.
        """
        if len(choices) != self._num_routers:
            raise NumericsError(
                f"{len(choices)} of {self._num_routers} layers with experts recorded their choices, so the "
                "loss's balance would be wrong; set actor.compile: false, and report this as a bug"
            )
        with torch.set_grad_enabled(bool(self._actor.load_balance_coef)):
            rows = balance_by_row(choices, batch, self._network.context) * batch.mask.any(-1)
        return rows.sum() / denominators.num_sequences

    def _per_token(
        self, log_probs: Tensor, part: TrainingBatch, top_k: TopK | None
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Returns the policy loss, (B, R), and its metrics, always with `ppo_kl`, which the guard needs."""
        mask = part.batch.mask
        part.log_probs.setdefault("old", log_probs.detach())
        inputs = LossInputs(
            log_probs=log_probs,
            log_probs_of=part.log_probs,
            advantages=part.advantages,
            mask=mask,
            scores=part.scores,
            group_ids=part.group_ids,
            values=part.values,
            selected=part.selected,
            top_k=top_k,
        )
        per_token, metrics = self._loss(inputs)
        if metrics.keys() != set(self._metrics):
            raise ConfigError(
                f"the policy loss returned the metrics {', '.join(metrics) or 'none'} where it first had "
                f"{', '.join(self._metrics) or 'none'}; return the same names at every call"
            )
        if "ppo_kl" not in metrics:
            log_ratio, _ = log_ratio_and_advantages(inputs)
            metrics = {**metrics, "ppo_kl": ppo_kl(log_ratio, mask)}
        return per_token, metrics

    def _aggregate(self, per_token: Tensor, batch: MicroBatch, denominators: Denominators) -> Tensor:
        return aggregate(
            per_token,
            batch.mask,
            self._actor.aggregation,
            num_tokens=denominators.num_tokens,
            num_sequences=denominators.num_sequences,
            constant=self._constant,
        )


def _top_k(batch: MicroBatch, scores: TokenScores, teacher: PackedTeacher | None) -> TopK | None:
    """Returns the tables of policy and teacher, (B, R, K + 1); None without a teacher."""
    if teacher is None or scores.top_k is None:
        return None
    log_probs = teacher.log_probs.to(scores.top_k.device, non_blocking=True)
    flat = torch.cat([log_probs, log_rest(log_probs).unsqueeze(-1)], dim=-1)
    return TopK(policy=batch.table(scores.top_k), teacher=batch.table(flat))


class ValueLoss:
    """The critic's loss on one micro-batch, as a share of the mini-batch's token mean."""

    names = ("vf_loss", "vf_clipfrac")

    def __init__(self, config: RunConfig, network: ValueNetwork) -> None:
        self._network, self._clip = network, config.critic.vf_clip_param

    def __call__(self, part: TrainingBatch, denominators: Denominators) -> tuple[Tensor, Tensor]:
        """Returns the share, with its graph, and the sums."""
        batch = part.batch
        assert part.values is not None and part.returns is not None  # noqa: PT018  a critic has made them
        values = batch.table(self._network(batch))
        per_token, metrics = clipped_value_loss(values, part.values, part.returns, batch.mask, self._clip)
        total = aggregate(per_token, batch.mask, "token-mean", num_tokens=denominators.num_tokens)
        return total, _sums(total, batch, metrics, self.names[1:], denominators)


def _sums(
    total: Tensor,
    batch: MicroBatch,
    means: Mapping[str, Tensor],
    names: Sequence[str],
    denominators: Denominators,
) -> Tensor:
    """Returns [loss, then each metric's share of the mini-batch's token mean], float64."""
    share = batch.mask.sum().double() / denominators.num_tokens
    zero = share.new_zeros(())
    # A loss without such a metric (for example without a clip) reports 0.
    return torch.stack([total.detach().double(), *(means.get(name, zero).double() * share for name in names)])


def _mean_of(table: Tensor, batch: MicroBatch) -> Tensor:
    return masked_sum(table, batch.mask) / batch.mask.sum().clamp(min=1)
