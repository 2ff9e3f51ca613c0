"""Estimates advantages, and shapes the batch around them: overlong penalty, rollout correction, resampling.

    prepare: overlong_scores -> _estimated -> rollout_weights, draw_rows -> drawn

Advantages have statistics over the whole batch. Tables are (B, R): B counts this rank's rows over all its
micro-batches, R is their longest response.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.algorithms import kl, rollout_correction
from paceline.algorithms.algorithm import Estimator
from paceline.algorithms.rows import SampleRows
from paceline.algorithms.shaping import overlong_penalty, resample_indices
from paceline.algorithms.statistics import RowShard, masked_mean
from paceline.config.run import RunConfig
from paceline.config.training.algorithm import KLKind
from paceline.config.training.shaping import RolloutCorrectionConfig
from paceline.core.training import BatchRow, ChunkOrder, TrainOrder
from paceline.learner.batch.types import ScoredBatch, TrainingBatch
from paceline.learner.distributed.ranks import Ranks
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
    own = _OwnRows.of(scored, scores, group_ids, first_row, learner.ranks.device)
    parts, metrics = _estimated(learner, rows, scored, own, estimator, scores, greedy, kl_coef)
    weights = [rollout_weights(part, correction) for part in scored]
    counts, resampling = draw_rows(config, scores=scores, group_ids=group_ids, step=order.step)
    return PreparedBatch(
        batches=[
            drawn(replace(part, weights=of_part), counts)
            for part, of_part in zip(parts, weights, strict=True)
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


def drawn(part: TrainingBatch, counts: Tensor | None) -> TrainingBatch:
    """Returns a micro-batch whose tables repeat each row as drawn; without `counts` it stays as it is.

    A row that was drawn three times runs through the network once, but is in the losses' tables three times,
    so its gradient counts three times. A row that was not drawn leaves the tables. Losses, means and counts
    are those of a batch that repeats the rows.
    """
    rows = part.batch.rows
    if counts is None or not rows:
        return part
    places = torch.arange(len(rows)).repeat_interleave(counts[list(rows)]).to(part.batch.mask.device)
    return part.with_rows(part.batch.with_rows(places), lambda table: table[places])


def _estimated(
    learner: Learner,
    rows: Sequence[BatchRow],
    scored: Sequence[ScoredBatch],
    own: _OwnRows,
    estimator: Estimator,
    scores: Sequence[float],
    greedy_scores: Sequence[float | None],
    kl_coef: float,
) -> tuple[list[TrainingBatch], dict[str, float]]:
    """Computes token rewards with the KL penalty, then advantages by micro-batch and the batch's metrics.

    Args:
        rows: all rows of the step or chunk, on every rank, with their `scores`.
        greedy_scores: score of the greedy answer to each row's prompt; ignored unless every row has one.
    """
    algorithm, ranks = learner.config.algorithm, learner.ranks
    in_reward = _penalty(scored, algorithm.kl_penalty) if algorithm.use_kl_in_reward else None
    placed = own.placed([row.token_rewards for row in rows])
    token_rewards = kl.token_rewards(own.scores, own.mask, in_reward, kl_coef, placed)
    greedy = [score for score in greedy_scores if score is not None]
    advantages, returns = estimator(
        SampleRows(
            scores=kl.penalized_scores(own.scores, own.mask, in_reward, kl_coef),
            token_rewards=token_rewards,
            mask=own.mask,
            group_ids=own.group_ids,
            log_probs=_log_probs(scored),
            values=own.values,
            greedy_scores=own.taken(greedy) if len(greedy) == len(rows) else None,
            shard=_shard(own.index, len(rows), ranks),
        )
    )
    metrics = _metrics(scores, token_rewards, advantages, returns, own.values, own.mask, ranks)
    return _split(scored, own, advantages, returns), metrics


def mean_reference_kl(
    config: RunConfig, scored: Sequence[ScoredBatch], num_sequences: int, ranks: Ranks
) -> float | None:
    """Returns the KL to the reference before the update, in nats per token; None without a reference.

    Args:
        scored: this rank's micro-batches with old log-probs, fillers included.
        num_sequences: number of sequences of the step, on all ranks.
        ranks: the ranks over whose sequences the mean of sequence means is taken.
    """
    penalty = _penalty(scored, config.algorithm.kl_penalty)
    if penalty is None:
        return None
    mask = _stack([part.batch.mask for part in scored], scored)
    total = ranks.data.all_sum(masked_mean(penalty, mask, dim=-1).double().sum().reshape(1))
    return float(total.item()) / num_sequences


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _OwnRows:
    """This rank's stacked rows: places among all rows, scores and group ids (B,), and tables (B, R)."""

    index: Tensor
    scores: Tensor
    group_ids: Tensor
    mask: Tensor
    values: Tensor | None

    @classmethod
    def of(
        cls,
        scored: Sequence[ScoredBatch],
        scores: Sequence[float],
        group_ids: Sequence[int],
        first_row: int,
        device: torch.device,
    ) -> _OwnRows:
        rows = [row - first_row for part in scored for row in part.batch.rows]
        index = torch.tensor(rows, dtype=torch.int64, device=device)
        return cls(
            index=index,
            scores=torch.tensor(scores, dtype=torch.float32, device=device)[index],
            group_ids=torch.tensor(group_ids, dtype=torch.int64, device=device)[index],
            mask=_stack([part.batch.mask for part in scored], scored),
            values=_stack_present([part.values for part in scored], scored),
        )

    def taken(self, numbers: Sequence[float]) -> Tensor:
        """Returns the numbers of these rows, (B,), out of those of all rows."""
        return torch.tensor(numbers, dtype=torch.float32, device=self.index.device)[self.index]

    def placed(self, parts: Sequence[Sequence[tuple[int, float]]]) -> Tensor | None:
        """Puts the parts of the scores on their tokens, (B, R), in float32; None if no row has any."""
        if not any(parts):
            return None
        table = torch.zeros(self.mask.shape, dtype=torch.float32)
        for row, index in enumerate(self.index.tolist()):
            for position, part in parts[index]:
                table[row, position] += part
        return table.to(self.mask.device)


def _penalty(scored: Sequence[ScoredBatch], kind: KLKind) -> Tensor | None:
    """Returns each token's KL to the reference, (B, R); None without a reference."""
    ref = _stack_present([part.log_probs.get("reference") for part in scored], scored)
    if ref is None:
        return None
    return kl.kl_estimate(_stack([part.log_probs["old"] for part in scored], scored), ref, kind)


def _shard(index: Tensor, num_rows: int, ranks: Ranks) -> RowShard:
    """Makes a shard of a batch of `num_rows` rows that lies on all ranks."""

    def gather(rows: Tensor) -> Tensor:
        # Each row is on one rank, so the sum only adds zeros and is exact; every rank gets the batch's order.
        everywhere = torch.zeros(num_rows, dtype=rows.dtype, device=ranks.device)
        everywhere[index] = rows
        return ranks.data.all_sum(everywhere)

    return RowShard(all_reduce=ranks.data.all_sum, gather=gather, rows=index)


def _log_probs(scored: Sequence[ScoredBatch]) -> dict[str, Tensor]:
    """Returns log-probs by name, (B, R) each, if every micro-batch has them."""
    names = dict.fromkeys(name for part in scored for name in part.log_probs)
    stacked = {name: _stack_present([part.log_probs.get(name) for part in scored], scored) for name in names}
    return {name: table for name, table in stacked.items() if table is not None}


def _stack(tables: Sequence[Tensor], scored: Sequence[ScoredBatch]) -> Tensor:
    """Concatenates the rows of all tables, padded to the longest, without fillers."""
    longest = max(table.shape[1] for table in tables)
    padded = [
        F.pad(table[: len(part.batch.rows)], (0, longest - table.shape[1]))
        for table, part in zip(tables, scored, strict=True)
    ]
    return torch.cat(padded)


def _stack_present(tables: Sequence[Tensor | None], scored: Sequence[ScoredBatch]) -> Tensor | None:
    present = [table for table in tables if table is not None]
    return _stack(present, scored) if len(present) == len(tables) else None


def _split(
    scored: Sequence[ScoredBatch], own: _OwnRows, advantages: Tensor, returns: Tensor | None
) -> list[TrainingBatch]:
    """Splits stacked rows by micro-batch; a filler gets zeros."""
    split, first = [], 0
    for part in scored:
        count, shape = len(part.batch.rows), part.batch.mask.shape
        rows = slice(first, first + count)
        first += count

        def cut(table: Tensor, rows: slice = rows, shape: torch.Size = shape) -> Tensor:
            shape = shape[: table.dim()]
            part = table[rows, : shape[1]] if len(shape) > 1 else table[rows]
            return part if len(part) == shape[0] else table.new_zeros(shape)

        split.append(
            TrainingBatch(
                batch=part.batch,
                log_probs=part.log_probs,
                values=part.values,
                scores=cut(own.scores),
                group_ids=cut(own.group_ids),
                advantages=cut(advantages),
                returns=None if returns is None else cut(returns),
            )
        )
    return split


def _metrics(
    scores: Sequence[float],
    token_rewards: Tensor,
    advantages: Tensor,
    returns: Tensor | None,
    values: Tensor | None,
    mask: Tensor,
    ranks: Ranks,
) -> dict[str, float]:
    count = mask.double().sum()

    def total(table: Tensor) -> Tensor:
        return torch.where(mask, table.double(), 0.0).sum()

    sums = [count, total(token_rewards), total(advantages)]
    if returns is not None and values is not None:
        error = returns.double() - values.double()
        sums += [total(returns), total(values), total(returns.double() ** 2), total(error), total(error**2)]
    parts = ranks.data.all_sum(torch.stack(sums)).tolist()
    num_tokens = parts[0]
    metrics = {
        "critic/score/mean": sum(scores) / len(scores),
        "critic/rewards/mean": parts[1] / len(scores),
        "critic/advantages/mean": parts[2] / num_tokens,
    }
    if len(parts) > 3:
        mean_return, mean_square = parts[3] / num_tokens, parts[5] / num_tokens
        spread = mean_square - mean_return**2
        unexplained = parts[7] / num_tokens - (parts[6] / num_tokens) ** 2
        metrics |= {
            "critic/returns/mean": mean_return,
            "critic/values/mean": parts[4] / num_tokens,
            "critic/vf_explained_var": 1.0 - unexplained / spread if spread > 0 else 0.0,
        }
    return metrics
