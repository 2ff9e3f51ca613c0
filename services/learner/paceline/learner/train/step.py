"""One training step on a rank; every rank runs it with the same order.

plan -> fetch -> score -> prepare (advantages, shaping) -> update critic, policy -> metrics

What was done ahead of the barrier is taken where it fits, and not computed again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.config.run import RunConfig
from paceline.core.training import BatchRow, TrainOrder, TrainResult
from paceline.learner.batch.minibatch import MiniBatch, cut_mini_batches
from paceline.learner.batch.planning.plan import BatchPlan
from paceline.learner.batch.types import ScoredBatch, TrainingBatch
from paceline.learner.model.flops import arithmetic_of, peak_flops
from paceline.learner.train.estimating import shaping
from paceline.learner.train.estimating.advantages import compute_advantages, mean_reference_kl
from paceline.learner.train.scoring.chunks import Fetch, critic_alone, lengths, num_unscored, score_chunks
from paceline.learner.train.scoring.score import score_rest
from paceline.learner.train.state.ahead import BegunGradient, ScoredChunk
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.stopwatch import Stopwatch
from paceline.learner.train.updating.update import UpdateReport, update_critic, update_policy
from paceline.learner.train.updating.update_guard import UpdateGuard

log = logging.getLogger(__name__)

Deposit = Callable[[Sequence[ScoredBatch]], None]
"""Takes this rank's old log-probs once the step has them."""


def train_step(
    learner: Learner, order: TrainOrder, fetch: Fetch, deposit: Deposit | None = None
) -> TrainResult:
    """Runs the step and moves the learner to version `order.step`.

    Before it returns on one rank, `deposit` has returned on all.

    Raises:
        DataError, ProtocolError, BrokerError: the rows are unusable; nothing has changed.
        NumericsError: the numbers of the step contradict each other.
    """
    config, ranks, ahead = learner.config, learner.ranks, learner.ahead
    ahead.turn_to(order.step, order.policy)
    stopwatch = Stopwatch(ranks.device, peaks=dict(ahead.peaks))
    flops = arithmetic_of(learner.actor.network).of_rows(lengths(order.rows))
    plan, chunks = _plan_and_score(learner, order, fetch, stopwatch)
    scored = [part for chunk in chunks for part in chunk.parts]
    with stopwatch.phase("adv"):
        prepared = _prepare(learner, order, scored)
    mini_batches = cut_mini_batches(config, plan, prepared.batches, ranks)
    guard = UpdateGuard(config.guard, learner.histories, ranks, order.adjustments)
    guard.judge_batch([row.reward for row in order.rows])
    judges_first = config.needs_all_old_log_probs
    reference_kl = _judged_reference_kl(learner, order, scored, guard) if judges_first else None
    begun = _begun(learner, order, plan, chunks, prepared.batches, guard)
    done_ahead = ahead.metrics(chunks)
    if guard.refusal:
        score_rest(learner, scored)
    reports = _update(learner, order.step, mini_batches, stopwatch, guard, begun)
    if not judges_first:
        reference_kl = _judged_reference_kl(learner, order, scored, guard)
    if deposit is not None:
        deposit(scored)  # the metrics are gathered after it
    _steer_kl(learner, order, reference_kl, reports)
    learner.version = order.step
    metrics = {
        "algorithm/reference_kl": reference_kl or 0.0,
        **_report_metrics(reports, is_audited=not num_unscored(learner, order.step)),
        **prepared.metrics,
        **shaping.mismatch_metrics(scored, prepared.weights, config.algorithm.rollout_correction, ranks),
        **_length_metrics(config, order.rows),
        **guard.metrics,
        **learner.memory.metrics,
        **stopwatch.seconds,
        **stopwatch.memory(ranks),
        **_compiling(learner),
        **_utilisation(learner, flops, stopwatch),
        **(done_ahead if config.barrier.work_ahead != "off" else {}),
        "perf/imbalance": plan.imbalance,
        "perf/computed_share": plan.cost / flops,
    }
    ahead.finish()
    reasons = [f"{name}: {reason}" for name, report in reports.items() for reason in report.skipped]
    return TrainResult(
        step=order.step, metrics=metrics, skip_reasons=tuple(reasons), readings=tuple(guard.readings)
    )


def _plan_and_score(
    learner: Learner, order: TrainOrder, fetch: Fetch, stopwatch: Stopwatch
) -> tuple[BatchPlan, list[ScoredChunk]]:
    chunks = score_chunks(
        learner,
        order.step,
        lambda planner: dict(enumerate(planner.step(order.rows).chunks)),
        dict(enumerate(order.rows)),
        fetch,
        stopwatch,
    )
    width = learner.config.prompts_per_chunk
    return BatchPlan(chunks=tuple(c.chunk for c in chunks), prompts_per_chunk=width), chunks


def _begun(
    learner: Learner,
    order: TrainOrder,
    plan: BatchPlan,
    chunks: Sequence[ScoredChunk],
    batches: Sequence[TrainingBatch],
    guard: UpdateGuard,
) -> BegunGradient | None:
    """What was done ahead of the first mini-batch's gradient; None if nothing was, or the step has no use."""
    if guard.refusal:
        learner.ahead.drop_gradient()
        return None
    first = plan.mini_batches(learner.config.actor.ppo_mini_batch_size)[0]
    return learner.ahead.begun([chunks[index] for index in first], batches, order.adjustments)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    """This rank's micro-batches ready for the update with their corrections, and the batch's numbers."""

    batches: list[TrainingBatch]
    weights: list[Tensor | None]
    metrics: dict[str, float]


def _prepare(learner: Learner, order: TrainOrder, scored: Sequence[ScoredBatch]) -> _Prepared:
    config, ranks = learner.config, learner.ranks
    correction = config.algorithm.rollout_correction
    scores, greedy, overlong = shaping.overlong_scores(config, order.rows)
    group_ids = [row.trajectory_id.prompt_id for row in order.rows]
    kl_coef = order.adjustments.kl_coef(learner.kl_controller.value)
    advantages, metrics = compute_advantages(
        config,
        scored,
        scores=scores,
        group_ids=group_ids,
        greedy_scores=greedy,
        placed=[row.token_rewards for row in order.rows],
        kl_coef=kl_coef,
        critic_alone=critic_alone(learner, order.step),
        ranks=ranks,
    )
    weights = [shaping.rollout_weights(part, correction) for part in scored]
    counts, resampling = shaping.draw_rows(config, scores=scores, group_ids=group_ids, step=order.step)
    return _Prepared(
        batches=[
            shaping.training_batch(part, part_advantages, part_weights, counts)
            for part, part_advantages, part_weights in zip(scored, advantages, weights, strict=True)
        ],
        weights=weights,
        metrics={**metrics, **overlong, **resampling, "algorithm/kl_coef": kl_coef},
    )


def _update(
    learner: Learner,
    step: int,
    mini_batches: dict[str, list[MiniBatch]],
    stopwatch: Stopwatch,
    guard: UpdateGuard,
    begun: BegunGradient | None,
) -> dict[str, UpdateReport]:
    config, ranks, reports = learner.config, learner.ranks, {}
    if learner.critic is not None:
        with stopwatch.phase("update_critic"):
            reports["critic"] = update_critic(
                learner.critic,
                mini_batches["critic"],
                config,
                step=step,
                ranks=ranks,
                guard=guard,
                memory=learner.memory,
            )
    if not critic_alone(learner, step):
        with stopwatch.phase("update_actor"):
            reports["actor"] = update_policy(
                learner.actor,
                mini_batches["actor"],
                config,
                step=step,
                ranks=ranks,
                guard=guard,
                memory=learner.memory,
                begun=begun,
            )
    return reports


def _judged_reference_kl(
    learner: Learner, order: TrainOrder, scored: Sequence[ScoredBatch], guard: UpdateGuard
) -> float | None:
    """The step's KL to the reference, None without one; the guard has judged it."""
    value = mean_reference_kl(learner.config, scored, len(order.rows), learner.ranks)
    if value is not None:
        guard.judge_reference_kl(value)
    return value


def _steer_kl(
    learner: Learner, order: TrainOrder, reference_kl: float | None, reports: dict[str, UpdateReport]
) -> None:
    """Adapts the KL coefficient to the step's KL, unless the guard fixed it or the policy was not updated."""
    actor = reports.get("actor")
    if order.adjustments.fixed_kl_coef is not None or actor is None or not actor.metrics:
        return
    if reference_kl is not None and math.isfinite(reference_kl):
        learner.kl_controller.update(reference_kl, len(order.rows))


def _report_metrics(reports: dict[str, UpdateReport], *, is_audited: bool) -> dict[str, float]:
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
    """`perf/comp*` of a run with compiled layers; a step that compiled says so in the log."""
    if learner.compile_clock is None:
        return {}
    compiled = learner.compile_clock.take()
    if compiled.count:
        log.info("step %d: %s", learner.version, compiled)
    return {"perf/compile_s": compiled.seconds, "perf/compilations": float(compiled.count)}


def _utilisation(learner: Learner, flops: int, stopwatch: Stopwatch) -> dict[str, float]:
    """`perf/mfu` of the policy's update, whose passes take `flops` each, if the device's peak is known."""
    seconds, peak = stopwatch.seconds.get("timing_s/update_actor"), peak_flops(learner.ranks.device)
    if not seconds or peak is None:
        return {}
    seconds += learner.ahead.update_s
    flops *= learner.config.actor.ppo_epochs
    return {"perf/mfu": flops / (seconds * learner.ranks.world.size * peak)}


def _length_metrics(config: RunConfig, rows: Sequence[BatchRow]) -> dict[str, float]:
    """Of sampled tokens; the limit that clips holds for sampled and other tokens together."""
    lengths = [row.num_sampled_tokens for row in rows]
    longest = config.data.max_response_length
    return {
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/clip_ratio": sum(row.num_response_tokens >= longest for row in rows) / len(rows),
    }
