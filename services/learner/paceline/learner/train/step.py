"""One training step on one rank: fetch, score, advantages, updates; every rank runs it with the same order.

rows -> plan -> fetch -> old log-probs, reference log-probs, values -> advantages -> critic -> policy -> metrics
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.config.run import RunConfig
from paceline.core.training import BatchRow, TrainOrder, TrainResult
from paceline.learner.batch.minibatch import MiniBatch, cut_mini_batches
from paceline.learner.batch.pack import MicroBatch, PackedRow, pack
from paceline.learner.batch.plan import BatchPlan, RowLength, effective_budget, plan_batch
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.flops import peak_flops, update_flops
from paceline.learner.train.advantages import Scored, compute_advantages
from paceline.learner.train.learner import Learner
from paceline.learner.train.mismatch import mismatch_metrics, with_rollout_weights
from paceline.learner.train.overlong import shaped_scores
from paceline.learner.train.resampling import resample
from paceline.learner.train.trainable import without_gradient
from paceline.learner.train.update import UpdateReport, update_critic, update_policy
from paceline.learner.train.update_guard import UpdateGate


@dataclass(slots=True)
class Stopwatch:
    """Seconds by phase, under `timing_s/`."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a block; on CUDA until its work is done."""
        began = time.monotonic()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[f"timing_s/{name}"] = time.monotonic() - began


Fetch = Callable[[Sequence[int]], dict[int, PackedRow]]
"""Rows by their index in the batch; raises on every rank if any rank's rows are unusable."""


def plan_of(config: RunConfig, rows: Sequence[BatchRow], ranks: Ranks) -> BatchPlan:
    """How the step's rows are cut."""
    sizes = [config.actor.ppo_mini_batch_size]
    if config.needs_critic and config.critic.ppo_mini_batch_size is not None:
        sizes.append(config.critic.ppo_mini_batch_size)
    lengths = _lengths(rows)
    return plan_batch(
        lengths,
        mini_batch_sizes=sizes,
        world_size=ranks.world_size,
        token_budget=effective_budget(
            config.actor.ppo_max_token_len_per_gpu,
            ranks.device.type,
            max((one.num_tokens for one in lengths), default=0),
        ),
    )


def _lengths(rows: Sequence[BatchRow]) -> list[RowLength]:
    return [
        RowLength(
            prompt_id=row.trajectory_id.prompt_id,
            num_prompt_tokens=row.num_prompt_tokens,
            num_response_tokens=row.num_response_tokens,
        )
        for row in rows
    ]


def train_step(learner: Learner, order: TrainOrder, fetch: Fetch) -> TrainResult:
    """Runs the step and moves the learner to version `order.step`.

    Raises:
        DataError, ProtocolError, BrokerError: the rows are unusable; nothing has changed.
        NumericsError: the numbers make no sense.
    """
    config, ranks, watch = learner.config, learner.ranks, Stopwatch(learner.ranks.device)
    plan = plan_of(config, order.rows, ranks)
    with watch.phase("fetch"):
        found = fetch(plan.rows_of(ranks.rank))
        batches = [
            pack([found[row] for row in rows], ranks.device)
            for chunk in plan.chunks
            for rows in chunk.micro_batches[ranks.rank]
        ]
    scored = _score(learner, batches, watch)
    critic_alone = learner.critic is not None and order.step <= config.critic.warmup
    with watch.phase("adv"):
        scores, shaping = shaped_scores(config, order.rows)
        group_ids = [row.trajectory_id.prompt_id for row in order.rows]
        kl_coef = order.adjustments.kl_coef(learner.kl_controller.value)
        prepared, summary = compute_advantages(
            config,
            scored,
            scores=scores,
            group_ids=group_ids,
            greedy_scores=[row.greedy_score for row in order.rows],
            kl_coef=kl_coef,
            critic_alone=critic_alone,
            ranks=ranks,
        )
        prepared = with_rollout_weights(prepared, config.algorithm.rollout_correction)
        mismatch = mismatch_metrics(prepared, config.algorithm.rollout_correction, ranks)
        prepared, resampling = resample(config, prepared, scores=scores, group_ids=group_ids, step=order.step)
    minis = cut_mini_batches(config, plan, prepared, ranks)
    gate = UpdateGate(config.guard, learner.histories, ranks, order.adjustments)
    gate.judge_batch(rewards=[row.reward for row in order.rows], reference_kl=summary.reference_kl)
    reports = _update(learner, order.step, minis, watch, gate, critic_alone=critic_alone)
    # A KL that is not finite comes with a skipped update; the coefficient then stays, as it does while the policy does. One that
    # the guard has fixed is not steered.
    steered = order.adjustments.fixed_kl_coef is None and not critic_alone
    if steered and summary.reference_kl is not None and math.isfinite(summary.reference_kl):
        learner.kl_controller.update(summary.reference_kl, summary.num_sequences)
    learner.version = order.step
    metrics = {
        **_report_metrics(reports),
        **summary.metrics,
        **mismatch,
        **shaping,
        **resampling,
        **_length_metrics(config, order.rows),
        **gate.metrics,
        "algorithm/kl_coef": kl_coef,
        "algorithm/reference_kl": summary.reference_kl or 0.0,
        **watch.seconds,
        **_utilisation(learner, order.rows, watch),
    }
    reasons = [f"{name}: {reason}" for name, report in reports.items() for reason in report.skipped]
    return TrainResult(
        step=order.step, metrics=metrics, skip_reasons=tuple(reasons), readings=tuple(gate.readings)
    )


def _score(learner: Learner, batches: Sequence[MicroBatch], watch: Stopwatch) -> list[Scored]:
    temperature = learner.config.rollout.temperature
    policy, reference, critic = learner.actor.network, learner.reference, learner.critic
    none: list[Tensor | None] = [None] * len(batches)
    ref, values = none, none
    with watch.phase("old_log_prob"):
        old = without_gradient(policy, batches, lambda b: b.table(policy(b, temperature)[0]))
    if reference is not None:
        with watch.phase("ref"):
            ref = [*without_gradient(reference, batches, lambda b: b.table(reference(b, temperature)[0]))]
    if critic is not None:
        with watch.phase("values"):
            values = [*without_gradient(critic.network, batches, lambda b: b.table(critic.network(b)))]
    return [
        Scored(batch=batch, old_log_probs=o, ref_log_probs=r, values=v)
        for batch, o, r, v in zip(batches, old, ref, values, strict=True)
    ]


def _update(
    learner: Learner,
    step: int,
    minis: dict[str, list[MiniBatch]],
    watch: Stopwatch,
    gate: UpdateGate,
    *,
    critic_alone: bool,
) -> dict[str, UpdateReport]:
    config, reports = learner.config, {}
    if learner.critic is not None:
        with watch.phase("update_critic"):
            reports["critic"] = update_critic(
                learner.critic, minis["critic"], config, step=step, ranks=learner.ranks, gate=gate
            )
    if not critic_alone:
        with watch.phase("update_actor"):
            reports["actor"] = update_policy(
                learner.actor, minis["actor"], config, step=step, ranks=learner.ranks, gate=gate
            )
    return reports


def _report_metrics(reports: dict[str, UpdateReport]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, report in reports.items():
        metrics |= report.summary(f"{name}/")
    metrics.pop("actor/loss", None)
    actor = reports.get("actor")
    if actor is not None and actor.metrics:
        metrics["actor/first_ppo_kl"] = actor.metrics[0]["ppo_kl"]
        metrics["actor/first_pg_clipfrac"] = actor.metrics[0]["pg_clipfrac"]
    return metrics


def _utilisation(learner: Learner, rows: Sequence[BatchRow], watch: Stopwatch) -> dict[str, float]:
    """`perf/mfu` of the policy's update, where the device's peak is known."""
    seconds, peak = watch.seconds.get("timing_s/update_actor"), peak_flops(learner.ranks.device)
    if not seconds or peak is None:
        return {}
    flops = learner.config.actor.ppo_epochs * update_flops(learner.actor.network, _lengths(rows))
    return {"perf/mfu": flops / (seconds * learner.ranks.world_size * peak)}


def _length_metrics(config: RunConfig, rows: Sequence[BatchRow]) -> dict[str, float]:
    lengths = [row.num_response_tokens for row in rows]
    return {
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/clip_ratio": sum(x >= config.data.max_response_length for x in lengths)
        / len(lengths),
    }
