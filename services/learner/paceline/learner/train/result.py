"""Ends a training step: adapts the KL coefficient, increments the version, and reports."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

from paceline.config.run import RunConfig
from paceline.core.training import BatchRow, TrainOrder, TrainResult
from paceline.learner.batch.types import ScoredBatch
from paceline.learner.model.flops import arithmetic_of, peak_flops
from paceline.learner.train.estimating.shaping import PreparedBatch, mismatch_metrics
from paceline.learner.train.scoring.chunks import ScoredStep, lengths, num_unscored
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.stopwatch import Stopwatch
from paceline.learner.train.updating.update import UpdateReport
from paceline.learner.train.updating.update_guard import UpdateGuard

log = logging.getLogger(__name__)

Deposit = Callable[[Sequence[ScoredBatch]], None]
"""Receives this rank's old log-probs once the step has them."""


def conclude(
    learner: Learner,
    order: TrainOrder,
    scored: ScoredStep,
    prepared: PreparedBatch,
    reports: Mapping[str, UpdateReport],
    guard: UpdateGuard,
    stopwatch: Stopwatch,
    *,
    reference_kl: float | None,
    deposit: Deposit | None,
) -> TrainResult:
    """Moves the learner to version `order.step` and returns the step's result; every rank calls it.

    It returns on a rank only after `deposit` has returned on all.
    """
    config, ranks = learner.config, learner.ranks
    if deposit is not None:
        deposit(scored.parts)  # before the collectives of the metrics
    _steer_kl(learner, order, reference_kl, reports.get("actor"))
    learner.version = order.step
    correction = config.rollout_correction
    flops = arithmetic_of(learner.actor.network).of_rows(lengths(order.rows))
    metrics = {
        "algorithm/reference_kl": reference_kl or 0.0,
        **_report_metrics(reports, is_audited=not num_unscored(learner, order.step)),
        **prepared.metrics,
        **mismatch_metrics(scored.parts, prepared.weights, correction, ranks),
        **_length_metrics(config, order.rows),
        **guard.metrics,
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
        step=order.step, metrics=metrics, skip_reasons=tuple(reasons), readings=tuple(guard.readings)
    )


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
