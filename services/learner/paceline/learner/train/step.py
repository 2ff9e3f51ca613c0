"""Runs a training step on a rank through an algorithm; every rank runs it with the same order.

score: plan -> fetch -> forward passes   estimate: advantages -> shaping   update: optimizer steps -> metrics

Matching work done ahead of the barrier is reused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.algorithms import rollout_correction
from paceline.algorithms.algorithm import Estimator, LossFunction, TrainedNetwork
from paceline.config.run import RunConfig
from paceline.config.training.shaping import RolloutCorrectionConfig
from paceline.core.training import BatchRow, TrainOrder, TrainResult
from paceline.learner.batch.types import ScoredBatch
from paceline.learner.distributed.collectives import require_same
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.flops import arithmetic_of, peak_flops
from paceline.learner.train.algorithm import algorithm_of
from paceline.learner.train.estimating import mean_reference_kl, prepare
from paceline.learner.train.scoring import Fetch, critic_alone, lengths, num_unscored, score_rest, score_step
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.stopwatch import Stopwatch
from paceline.learner.train.updating.update import (
    UpdateReport,
    cut_mini_batches,
    update_critic,
    update_policy,
)
from paceline.learner.train.updating.update_guard import UpdateGuard

log = logging.getLogger(__name__)

Deposit = Callable[[Sequence[ScoredBatch]], None]
"""Receives this rank's old log-probs once the step has them."""


def train_step(
    learner: Learner, order: TrainOrder, fetch: Fetch, deposit: Deposit | None = None
) -> TrainResult:
    """Runs the step and moves the learner to version `order.step`.

    It returns on a rank only after `deposit` has returned on all.

    Raises:
        DataError, ProtocolError, BrokerError: the rows are unusable; nothing has changed.
        NumericsError: the numbers of the step contradict each other.
        ConfigError: the user's own algorithm failed.
    """
    step = TrainingStep(learner, order, fetch)
    step.algorithm.step(step)
    return step.finish(deposit)


class TrainingStep:
    """Implements the verbs of a training step on this rank.

    The verbs handle stopwatch, guard, memory and work ahead.
    """

    def __init__(self, learner: Learner, order: TrainOrder, fetch: Fetch) -> None:
        config, ranks, adjustments = learner.config, learner.ranks, order.adjustments
        learner.ahead.turn_to(order.step, order.policy)
        self._learner, self._order, self._fetch = learner, order, fetch
        self._stopwatch = Stopwatch(ranks.device, peaks=dict(learner.ahead.peaks))
        self._guard = UpdateGuard(config.guard, learner.histories, ranks, adjustments)
        self._reference_kl: float | None = None
        self._reports: dict[str, UpdateReport] = {}
        self._is_warm_up = critic_alone(learner, order.step)
        self.has_critic = learner.critic is not None
        self.algorithm = algorithm_of(
            config, adjustments.clip_scale, critic_alone=self._is_warm_up, agree=partial(require_same, ranks)
        )

    def score(self) -> None:
        """Scores the samples by all networks, and lets the guard judge them."""
        learner, guard = self._learner, self._guard
        self._scored = score_step(learner, self._order, self._fetch, self._stopwatch)
        guard.judge_batch([row.reward for row in self._order.rows])
        if learner.config.needs_all_old_log_probs:
            self._judge_reference_kl()
        if guard.refusal:
            learner.ahead.drop_gradient()
            score_rest(learner, self._scored.parts)

    def estimate(self, estimator: Estimator) -> None:
        """Estimates advantages, and cuts the batch into mini-batches."""
        learner, order = self._learner, self._order
        with self._stopwatch.phase("adv"):
            self._prepared = prepare(learner, order, self._scored.parts, estimator)
        plan, batches = self._scored.plan, self._prepared.batches
        self._mini_batches = cut_mini_batches(learner.config, plan, batches, learner.ranks)

    def update(self, network: TrainedNetwork, loss: LossFunction | None = None) -> None:
        """Takes all optimizer steps of a network; none for the policy during the critic's warm-up."""
        learner, order, guard = self._learner, self._order, self._guard
        if network == "critic" and learner.critic is not None:
            with self._stopwatch.phase("update_critic"):
                self._reports["critic"] = update_critic(
                    learner, learner.critic, self._mini_batches["critic"], guard, step=order.step
                )
        elif loss is not None and not self._is_warm_up:
            first = self._scored.first(learner.config.actor.ppo_mini_batch_size)
            begun = learner.ahead.begun(first, self._prepared.batches, order.adjustments)
            with self._stopwatch.phase("update_actor"):
                self._reports["actor"] = update_policy(
                    learner, self._mini_batches["actor"], guard, loss, step=order.step, begun=begun
                )

    def finish(self, deposit: Deposit | None = None) -> TrainResult:
        """Adapts the KL coefficient, moves the learner to the step's version, and reports.

        It returns on a rank only after `deposit` has returned on all.
        """
        learner, order, scored, prepared = self._learner, self._order, self._scored, self._prepared
        reports, stopwatch = self._reports, self._stopwatch
        if not learner.config.needs_all_old_log_probs:
            self._judge_reference_kl()
        config, ranks = learner.config, learner.ranks
        if deposit is not None:
            deposit(scored.parts)  # before the collectives of the metrics
        _steer_kl(learner, order, self._reference_kl, reports.get("actor"))
        learner.version = order.step
        correction = config.rollout_correction
        flops = arithmetic_of(learner.actor.network).of_rows(lengths(order.rows))
        metrics = {
            "algorithm/reference_kl": self._reference_kl or 0.0,
            **_report_metrics(reports, is_audited=not num_unscored(learner, order.step)),
            **prepared.metrics,
            **_mismatch_metrics(scored.parts, prepared.weights, correction, ranks),
            **_length_metrics(config, order.rows),
            **self._guard.metrics,
            **learner.memory.metrics,
            **stopwatch.seconds,
            **stopwatch.memory(ranks),
            **_compiling(learner),
            **_utilisation(learner, flops, stopwatch),
            **(learner.ahead.metrics(scored.chunks) if config.barrier.work_ahead != "off" else {}),
            "perf/imbalance": scored.plan.imbalance,
            "perf/computed_share": scored.plan.cost / flops,
        }
        learner.ahead.finish()
        reasons = [f"{name}: {reason}" for name, report in reports.items() for reason in report.skipped]
        return TrainResult(
            step=order.step,
            metrics=metrics,
            skip_reasons=tuple(reasons),
            readings=tuple(self._guard.readings),
        )

    def _judge_reference_kl(self) -> None:
        """Lets the guard judge the step's KL to the reference, if there is one."""
        learner, num_rows = self._learner, len(self._order.rows)
        self._reference_kl = mean_reference_kl(learner.config, self._scored.parts, num_rows, learner.ranks)
        self._guard.judge_reference_kl(self._reference_kl)


def _steer_kl(
    learner: Learner, order: TrainOrder, reference_kl: float | None, actor: UpdateReport | None
) -> None:
    """Adapts the KL coefficient to the step's KL, unless the guard fixed it or the policy was not updated."""
    if order.adjustments.fixed_kl_coef is not None or actor is None or not actor.metrics:
        return
    if reference_kl is not None and math.isfinite(reference_kl):
        learner.kl_controller.update(reference_kl, len(order.rows))


def _report_metrics(reports: Mapping[str, UpdateReport], *, is_audited: bool) -> dict[str, float]:
    """Returns the updates' metrics, with those of the first mini-batch if its ratio was measured."""
    metrics: dict[str, float] = {}
    for name, report in reports.items():
        metrics |= report.summary(f"{name}/")
    metrics.pop("actor/loss", None)
    actor = reports.get("actor")
    if actor is not None and actor.metrics and is_audited:
        metrics["actor/first_ppo_kl"] = actor.metrics[0]["ppo_kl"]
        metrics["actor/first_pg_clipfrac"] = actor.metrics[0]["pg_clipfrac"]
    return metrics


def _compiling(learner: Learner) -> dict[str, float]:
    """Returns `perf/comp*` of a run with compiled layers; logs compilations of the step."""
    if learner.compile_clock is None:
        return {}
    compiled = learner.compile_clock.take()
    if compiled.count:
        log.info("step %d: %s", learner.version, compiled)
    return {"perf/compile_s": compiled.seconds, "perf/compilations": float(compiled.count)}


def _utilisation(learner: Learner, flops: int, stopwatch: Stopwatch) -> dict[str, float]:
    """Returns `perf/mfu` of the policy's update, with `flops` per pass, if the device's peak is known."""
    seconds, peak = stopwatch.seconds.get("timing_s/update_actor"), peak_flops(learner.ranks.device)
    if not seconds or peak is None:
        return {}
    seconds += learner.ahead.update_s
    flops *= learner.config.actor.ppo_epochs
    return {"perf/mfu": flops / (seconds * learner.ranks.world.size * peak)}


def _length_metrics(config: RunConfig, rows: Sequence[BatchRow]) -> dict[str, float]:
    """Returns lengths in sampled tokens; the share at the limit counts other tokens, too."""
    lengths = [row.num_sampled_tokens for row in rows]
    longest = config.data.max_response_length
    return {
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/clip_ratio": sum(row.num_response_tokens >= longest for row in rows) / len(rows),
    }


def _mismatch_metrics(
    scored: Sequence[ScoredBatch],
    weights: Sequence[Tensor | None],
    correction: RolloutCorrectionConfig,
    ranks: Ranks,
) -> dict[str, float]:
    """Returns the metrics `rollout/*`, over all ranks' tokens; every rank calls it.

    mismatch_kl is KL(sampler || learner) per token, by `rollout_correction.mismatch_kl`, logprob_diff_max the
    largest difference. effective_sample_size (a share in [0, 1]) and largest_weight refer to the weights
    before any cap, at the correction's level, or per token without a correction. corrected_share, only with a
    correction, is the share of tokens whose weight was capped or is 0.
    """
    kl_and_count = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    weight_sums = torch.zeros(4, dtype=torch.float64, device=ranks.device)
    largest = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for part, part_weights in zip(scored, weights, strict=True):
        old, rollout, mask = part.log_probs["old"], part.log_probs["rollout"], part.batch.mask
        kl_and_count[0] += rollout_correction.mismatch_kl(old, rollout, mask).sum()
        kl_and_count[1] += mask.sum()
        raw = rollout_correction.rollout_weights(
            old.double(), rollout.double(), mask, correction.weight_level
        )
        weight_sums[:3] += rollout_correction.weight_sums(raw, mask)
        if part_weights is not None:
            bounded = part_weights == 0 if correction.method != "tis" else raw > correction.cap
            weight_sums[3] += (bounded & mask).sum()
        difference = rollout_correction.log_prob_diff_max(old, rollout, mask).double()
        part_largest = torch.stack([difference, rollout_correction.largest_weight(raw, mask)])
        largest = torch.maximum(largest, part_largest)
    kl_sum, num_tokens = ranks.data.all_sum(kl_and_count).tolist()
    weight_sums, largest = ranks.data.all_sum(weight_sums), ranks.data.all_max(largest)
    effective = rollout_correction.effective_sample_size(weight_sums[:3])
    metrics = {
        "rollout/mismatch_kl": kl_sum / num_tokens,
        "rollout/logprob_diff_max": float(largest[0].item()),
        "rollout/effective_sample_size": float(effective.item()),
        "rollout/largest_weight": float(largest[1].item()),
    }
    if correction.method != "none":
        metrics["rollout/corrected_share"] = float(weight_sums[3].item()) / num_tokens
    return metrics
