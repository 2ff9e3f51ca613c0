"""From scores, log-probs and values of a rank's rows to their advantages: the numbers of the whole batch, on every rank.

Tables are (B, R): B this rank's rows over all its micro-batches, R their longest response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config.run import RunConfig
from paceline.learner.algorithms import kl, registry
from paceline.learner.algorithms.estimation import estimate_advantages
from paceline.learner.algorithms.statistics import masked_mean
from paceline.learner.batch.pack import MicroBatch
from paceline.learner.distributed.ranks import Ranks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scored:
    """What is known of a micro-batch before its update; tables (B, R) of that micro-batch, None where not in use."""

    batch: MicroBatch
    old_log_probs: Tensor
    ref_log_probs: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prepared:
    """A micro-batch ready for its updates.

    Attributes:
        scores: each sequence's reward with the overlong penalty, (B,).
        weights: rollout correction's factors of the policy loss, (B, R); None without a correction.
        selected: the tokens that a covariance loss treats apart, (B, R) booleans; None for the other losses.
    """

    batch: MicroBatch
    old_log_probs: Tensor
    ref_log_probs: Tensor | None
    values: Tensor | None
    advantages: Tensor
    returns: Tensor | None
    scores: Tensor | None = None
    weights: Tensor | None = None
    selected: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageSummary:
    """Numbers of the whole batch. `reference_kl` is the mean over sequences; None without a reference."""

    reference_kl: float | None
    num_sequences: int
    metrics: dict[str, float]


def compute_advantages(
    config: RunConfig,
    scored: Sequence[Scored],
    *,
    scores: Sequence[float],
    group_ids: Sequence[int],
    greedy_scores: Sequence[float | None] = (),
    kl_coef: float,
    critic_alone: bool = False,
    ranks: Ranks,
) -> tuple[list[Prepared], AdvantageSummary]:
    """Token rewards with the KL penalty, then advantages.

    Args:
        config: of the run.
        scored: this rank's micro-batches, fillers among them.
        scores: of all rows of the step, on every rank.
        group_ids: prompt of all rows of the step.
        greedy_scores: of the greedy answer to each row's prompt; of no use where a row lacks it.
        kl_coef: the penalty's coefficient in this step.
        critic_alone: whether this is a step of the critic's warm-up.
        ranks: over which the batch's statistics are taken.

    Raises:
        NumericsError: nothing to whiten, a group too small.
    """
    device = ranks.device
    longest = max(one.batch.mask.shape[1] for one in scored)
    mine = [row for one in scored for row in one.batch.rows]
    index = torch.tensor(mine, dtype=torch.int64, device=device)
    mask = _stack([one.batch.mask for one in scored], scored, longest)
    old = _stack([one.old_log_probs for one in scored], scored, longest)
    ref = _stack_known([one.ref_log_probs for one in scored], scored, longest)
    values = _stack_known([one.values for one in scored], scored, longest)
    greedy = _all_known(greedy_scores, len(scores), device)
    my_scores = torch.tensor(scores, dtype=torch.float32, device=device)[index]

    penalty = None if ref is None else kl.kl_estimate(old, ref, config.algorithm.kl_penalty)
    in_reward = penalty if config.algorithm.use_kl_in_reward else None
    token_rewards = kl.token_rewards(my_scores, mask, in_reward, kl_coef)
    estimator = registry.adv_estimator(config.algorithm.adv_estimator)

    def gather(rows: Tensor) -> Tensor:
        # Each row is on one rank; adding zeros is exact, and the order is the batch's everywhere.
        everywhere = torch.zeros(len(scores), dtype=rows.dtype, device=device)
        everywhere[index] = rows
        return ranks.all_sum(everywhere)

    advantages, returns = estimate_advantages(
        estimator,
        _options(config, estimator, critic_alone=critic_alone),
        token_rewards=token_rewards,
        mask=mask,
        group_ids=torch.tensor(group_ids, dtype=torch.int64, device=device)[index],
        values=values,
        greedy_scores=None if greedy is None else greedy[index],
        all_reduce=ranks.all_sum,
        gather=gather,
        rows=index,
    )
    metrics = _metrics(scores, token_rewards, advantages, returns, values, mask, ranks)
    prepared = _split(scored, my_scores, advantages, returns)
    return prepared, AdvantageSummary(
        reference_kl=None if penalty is None else _mean_over_sequences(penalty, mask, len(scores), ranks),
        num_sequences=len(scores),
        metrics=metrics,
    )


def _options(config: RunConfig, estimator: registry.Estimator, *, critic_alone: bool) -> dict[str, Any]:
    options = registry.configured_options(estimator.function, config.algorithm)
    if critic_alone and config.critic.warmup_lam is not None:
        # The advantages are not used; gae makes the critic's targets with lam, vapo with lam_critic.
        options |= {"lam": config.critic.warmup_lam, "lam_critic": config.critic.warmup_lam}
    return options


def _all_known(scores: Sequence[float | None], number: int, device: torch.device) -> Tensor | None:
    """The scores, (number,); None where one of them is not there."""
    known = [score for score in scores if score is not None]
    return torch.tensor(known, dtype=torch.float32, device=device) if len(known) == number else None


def _mean_over_sequences(table: Tensor, mask: Tensor, num_sequences: int, ranks: Ranks) -> float:
    """Mean over all ranks' sequences of each one's masked mean."""
    total = ranks.all_sum(masked_mean(table, mask, dim=-1).double().sum().reshape(1))
    return float(total.item()) / num_sequences


def _stack(tables: Sequence[Tensor], scored: Sequence[Scored], longest: int) -> Tensor:
    """Tables one below the other, without the fillers' rows."""
    kept = [
        F.pad(table[: len(one.batch.rows)], (0, longest - table.shape[1]))
        for table, one in zip(tables, scored, strict=True)
    ]
    return torch.cat(kept)


def _stack_known(tables: Sequence[Tensor | None], scored: Sequence[Scored], longest: int) -> Tensor | None:
    known = [table for table in tables if table is not None]
    return _stack(known, scored, longest) if len(known) == len(tables) else None


def _split(
    scored: Sequence[Scored], scores: Tensor, advantages: Tensor, returns: Tensor | None
) -> list[Prepared]:
    """The rows back to their micro-batches; a filler gets zeros."""
    prepared, first = [], 0
    for one in scored:
        count, shape = len(one.batch.rows), one.batch.mask.shape
        rows = slice(first, first + count)
        first += count

        def part(table: Tensor, rows: slice = rows, shape: torch.Size = shape) -> Tensor:
            cut = table[rows, : shape[1]]
            return cut if len(cut) == shape[0] else table.new_zeros(shape)

        prepared.append(
            Prepared(
                batch=one.batch,
                old_log_probs=one.old_log_probs,
                ref_log_probs=one.ref_log_probs,
                values=one.values,
                advantages=part(advantages),
                returns=None if returns is None else part(returns),
                scores=scores[rows] if count else scores.new_zeros(shape[:1]),
            )
        )
    return prepared


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
    parts = ranks.all_sum(torch.stack(sums)).tolist()
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
