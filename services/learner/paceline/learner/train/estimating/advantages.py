"""Computes the advantages of a rank's rows, with statistics over the batch.

Tables are (B, R): B counts this rank's rows over all its micro-batches, R is their longest response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.algorithms import kl
from paceline.algorithms.algorithm import Estimator
from paceline.algorithms.rows import SampleRows
from paceline.algorithms.statistics import RowShard, masked_mean
from paceline.config.run import RunConfig
from paceline.config.training.algorithm import KLKind
from paceline.learner.batch.types import ScoredBatch
from paceline.learner.distributed.ranks import Ranks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Advantages:
    """A micro-batch's `scores` and `group_ids` (B,), `advantages` and the critic's `returns` (B, R)."""

    scores: Tensor
    group_ids: Tensor
    advantages: Tensor
    returns: Tensor | None


def compute_advantages(
    config: RunConfig,
    scored: Sequence[ScoredBatch],
    estimator: Estimator,
    *,
    scores: Sequence[float],
    group_ids: Sequence[int],
    greedy_scores: Sequence[float | None] = (),
    placed: Sequence[Sequence[tuple[int, float]]] = (),
    kl_coef: float,
    first_row: int = 0,
    ranks: Ranks,
) -> tuple[list[Advantages], dict[str, float]]:
    """Computes token rewards with the KL penalty, then advantages.

    Args:
        scored: this rank's micro-batches, fillers included.
        scores: scores of all rows of the step or chunk, on every rank.
        group_ids: prompts of all rows.
        greedy_scores: score of the greedy answer to each row's prompt; ignored unless every row has one.
        placed: for each row, the parts of its score that belong to tokens, with their positions.
        kl_coef: the penalty's coefficient in this step.
        first_row: place of the first row in the step's batch.
        ranks: the ranks that share the rows' statistics.

    Returns:
        The advantages by micro-batch, and the metrics of the whole batch.

    Raises:
        NumericsError: too few tokens to whiten, or a group is too small.
    """
    own = _OwnRows.of(scored, scores, group_ids, first_row, ranks.device)
    in_reward = _penalty(scored, config.algorithm.kl_penalty) if config.algorithm.use_kl_in_reward else None
    token_rewards = kl.token_rewards(own.scores, own.mask, in_reward, kl_coef, own.placed(placed))
    greedy = _if_all_present(greedy_scores, len(scores), ranks.device)
    rows = SampleRows(
        scores=kl.penalized_scores(own.scores, own.mask, in_reward, kl_coef),
        token_rewards=token_rewards,
        mask=own.mask,
        group_ids=own.group_ids,
        log_probs=_log_probs(scored),
        values=own.values,
        greedy_scores=None if greedy is None else greedy[own.index],
        shard=_shard(own.index, len(scores), ranks),
    )
    advantages, returns = estimator(rows)
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
    return _mean_over_sequences(penalty, mask, num_sequences, ranks)


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


def _if_all_present(scores: Sequence[float | None], number: int, device: torch.device) -> Tensor | None:
    """Returns the scores, (number,); None if one is missing."""
    present = [score for score in scores if score is not None]
    return torch.tensor(present, dtype=torch.float32, device=device) if len(present) == number else None


def _mean_over_sequences(table: Tensor, mask: Tensor, num_sequences: int, ranks: Ranks) -> float:
    """Returns the mean over all ranks' sequences of their masked means."""
    total = ranks.data.all_sum(masked_mean(table, mask, dim=-1).double().sum().reshape(1))
    return float(total.item()) / num_sequences


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
) -> list[Advantages]:
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
            Advantages(
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
