"""Shapes a batch around its advantages: overlong penalty, rollout correction, resampling.

prepare: overlong_scores -> (advantages) -> rollout_weights, draw_rows -> training_batch
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.algorithms import rollout_correction
from paceline.algorithms.algorithm import Estimator
from paceline.algorithms.shaping import overlong_penalty, resample_indices
from paceline.config.run import RunConfig
from paceline.config.training.shaping import RolloutCorrectionConfig
from paceline.core.training import BatchRow, ChunkOrder, TrainOrder
from paceline.learner.batch.types import MicroBatch, ScoredBatch, TrainingBatch
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.train.estimating.advantages import Advantages, compute_advantages
from paceline.learner.train.state.learner import Learner


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedBatch:
    """This rank's corrected micro-batches, ready for the update, and the batch's metrics."""

    batches: list[TrainingBatch]
    weights: list[Tensor | None]
    metrics: dict[str, float]


def prepare(
    learner: Learner,
    order: TrainOrder | ChunkOrder,
    scored: Sequence[ScoredBatch],
    estimator: Estimator,
    *,
    first_row: int = 0,
) -> PreparedBatch:
    """Estimates advantages and shapes the batch around them; every rank calls it.

    Args:
        order: order of a step or a chunk.
        scored: this rank's micro-batches of its rows, fillers included.
        first_row: place of the first row in the step's batch.

    Raises:
        NumericsError: too few tokens to whiten, or a group is too small.
    """
    config, rows = learner.config, order.rows
    correction = config.rollout_correction
    kl_coef = order.adjustments.kl_coef(learner.kl_controller.value)
    scores, greedy, overlong = overlong_scores(config, rows)
    group_ids = [row.trajectory_id.prompt_id for row in rows]
    advantages, metrics = compute_advantages(
        config,
        scored,
        estimator,
        scores=scores,
        group_ids=group_ids,
        greedy_scores=greedy,
        placed=[row.token_rewards for row in rows],
        kl_coef=kl_coef,
        first_row=first_row,
        ranks=learner.ranks,
    )
    weights = [rollout_weights(part, correction) for part in scored]
    counts, resampling = draw_rows(config, scores=scores, group_ids=group_ids, step=order.step)
    return PreparedBatch(
        batches=[
            training_batch(part, part_advantages, part_weights, counts)
            for part, part_advantages, part_weights in zip(scored, advantages, weights, strict=True)
        ],
        weights=weights,
        metrics={**metrics, **overlong, **resampling, "algorithm/kl_coef": kl_coef},
    )


def overlong_scores(
    config: RunConfig, rows: Sequence[BatchRow]
) -> tuple[list[float], list[float | None], dict[str, float]]:
    """Returns scores and greedy scores with the penalty of `algorithm.overlong`, and its metrics.

    The penalty (DAPO, arXiv:2503.14476, eq. 13) is applied only here, to the controller's rewards. Every rank
    has all rows and computes the same.
    """
    scores, greedy = [row.reward for row in rows], [row.greedy_score for row in rows]
    overlong = config.algorithm.overlong
    if not overlong.enable:
        return scores, greedy, {}

    def penalties(lengths: Sequence[int]) -> list[float]:
        table = torch.tensor(lengths, dtype=torch.float64)
        longest = config.data.max_response_length
        return overlong_penalty(table, longest, overlong.buffer_length, overlong.factor).tolist()

    own = penalties([row.num_sampled_tokens for row in rows])
    of_greedy = penalties([row.num_greedy_tokens for row in rows])
    metrics = {
        "overlong/penalty_mean": sum(own) / len(own),
        "overlong/share": sum(penalty < 0 for penalty in own) / len(own),
    }
    return (
        [score + penalty for score, penalty in zip(scores, own, strict=True)],
        [None if score is None else score + p for score, p in zip(greedy, of_greedy, strict=True)],
        metrics,
    )


def rollout_weights(scored: ScoredBatch, correction: RolloutCorrectionConfig) -> Tensor | None:
    """Returns a micro-batch's loss weights by `algorithm.rollout_correction`, (B, R) or None."""
    if correction.method == "none":
        return None
    old, rollout, mask = scored.log_probs["old"], scored.log_probs["rollout"], scored.batch.mask
    if correction.method == "tis":
        return rollout_correction.tis(old, rollout, mask, correction.cap, correction.weight_level)
    if correction.method == "icepop":
        return rollout_correction.icepop(old, rollout, mask, correction.low, correction.high)
    return rollout_correction.sequence_mask(
        old, rollout, mask, correction.low, correction.high, correction.weight_level
    )


def mismatch_metrics(
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


def draw_rows(
    config: RunConfig, *, scores: Sequence[float], group_ids: Sequence[int], step: int
) -> tuple[Tensor | None, dict[str, float]]:
    """Returns how often `algorithm.resample` draws each row of the step, or None, and its metrics.

    It draws as many rows as the step has, with replacement, from a generator seeded by (trainer.seed, step),
    so every rank draws the same.

    Raises:
        NumericsError: a score is not finite.
    """
    resample = config.algorithm.resample
    if resample.method == "none":
        return None, {}
    digest = hashlib.blake2b(f"resample/{config.trainer.seed}/{step}".encode(), digest_size=8).digest()
    drawn = resample_indices(
        torch.tensor(scores, dtype=torch.float64),
        resample.method,
        resample.power,
        torch.tensor(group_ids, dtype=torch.int64),
        generator=torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1),
    )
    counts = torch.bincount(drawn, minlength=len(scores))
    return counts, {
        "resample/distinct_share": float((counts > 0).sum()) / len(scores),
        "resample/largest_count": float(counts.max()),
        "resample/score_mean": sum(scores[index] for index in drawn.tolist()) / len(scores),
    }


def training_batch(
    scored: ScoredBatch, advantages: Advantages, weights: Tensor | None, counts: Tensor | None
) -> TrainingBatch:
    """Makes a micro-batch ready for updates; with `counts` its tables repeat each row as drawn.

    A row that was drawn three times runs through the network once, but is in the losses' tables three times,
    so its gradient counts three times. A row that was not drawn leaves the tables. Losses, means and counts
    are those of a batch that repeats the rows.
    """
    part = TrainingBatch(
        batch=scored.batch,
        log_probs=scored.log_probs,
        values=scored.values,
        scores=advantages.scores,
        group_ids=advantages.group_ids,
        advantages=advantages.advantages,
        returns=advantages.returns,
        weights=weights,
    )
    places = _places(scored.batch, counts)
    if places is None:
        return part
    return part.with_rows(scored.batch.with_rows(places), lambda table: table[places])


def _places(batch: MicroBatch, counts: Tensor | None) -> Tensor | None:
    """Returns the table rows, each as often as it was drawn; None to keep all rows once."""
    if counts is None or not batch.rows:
        return None
    own_counts = counts[list(batch.rows)]
    return torch.arange(len(batch.rows)).repeat_interleave(own_counts).to(batch.mask.device)
