"""Advantage estimators: how much better a token did than expected.

B sequences, T positions, mask 1 on tokens of the policy. A hole in the mask (a tool's tokens) is skipped as
if it were not there. No result carries a gradient.

An estimator that looks beyond its own row takes `shard`: with the batch on several ranks, each rank passes
its rows and gets its rows of what the whole batch would give.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.algorithms.checks import (
    require_positions,
    require_range,
    require_rows,
    require_same_shape,
)
from paceline.algorithms.groups import GroupScores
from paceline.algorithms.scans import discounted_sums, next_unmasked
from paceline.algorithms.statistics import ALL_ROWS, RowShard, full_precision, keep, masked_whiten
from paceline.core.errors import NumericsError


def gae(
    token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), from the last token to the first.

    delta = r_t + gamma V' - V_t and A_t = delta + gamma lam A'. A masked position passes V' and A' on
    unchanged.

    Args:
        token_rewards: (B, T).
        values: (B, T).
        mask: (B, T).
        gamma: discount per token, in [0, 1].
        lam: lambda in [0, 1], or one per sequence, (B,).

    Returns:
        advantages (B, T), not whitened, and returns = advantages + values, (B, T). Under the mask both have
        no meaning.
    """
    require_same_shape(token_rewards=token_rewards, values=values, mask=mask)
    require_positions(mask)
    require_range("gamma", gamma, at_least=0.0, at_most=1.0)
    if isinstance(lam, Tensor):
        require_rows(mask.shape[0], lam=lam)
    else:
        require_range("lam", lam, at_least=0.0, at_most=1.0)
    rewards, values = full_precision(token_rewards.detach()), full_precision(values.detach())
    deltas = rewards + gamma * next_unmasked(values, mask) - values
    advantages = discounted_sums(deltas, mask, gamma * lam)
    return advantages, advantages + values


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """VAPO's lambda of a sequence, 1 - 1 / (alpha l) (arXiv:2504.05118), kept in [0, 1]; (B,) to (B,).

    The formula is negative for responses shorter than 1 / alpha tokens; there 0 is taken.
    """
    require_range("alpha", alpha, above=0.0)
    return (1.0 - 1.0 / (alpha * full_precision(lengths).clamp(min=1.0))).clamp(0.0, 1.0)


def vapo(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam_policy: float | None = None,
    lam_critic: float = 1.0,
    alpha: float = 0.05,
) -> tuple[Tensor, Tensor]:
    """Decoupled and length-adaptive GAE (VAPO, arXiv:2504.05118; VC-PPO, arXiv:2503.01491).

    `lam_policy`, or if None each response's `length_adaptive_lambda`, gives the advantages, `lam_critic` the
    critic's targets. Shapes and the rest as `gae`.
    """
    lam: float | Tensor
    if lam_policy is None:
        lam = length_adaptive_lambda(mask.bool().sum(-1).to(full_precision(values).dtype), alpha)
    else:
        lam = lam_policy
    advantages, _ = gae(token_rewards, values, mask, gamma, lam)
    _, returns = gae(token_rewards, values, mask, gamma, lam_critic)
    return advantages, returns


def grpo(
    scores: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    normalize_by_std: bool = True,
    eps: float = 1e-6,
    *,
    shard: RowShard = ALL_ROWS,
) -> Tensor:
    """(s - mean_g) / (std_g + eps) on every token (GRPO, arXiv:2402.03300, section 4.1.2).

    Args:
        scores: (B,).
        mask: (B, T).
        group_ids: (B,) integers: equal for samples of one prompt, and meaning the same on every rank.
        normalize_by_std: False leaves out the division: Dr. GRPO (arXiv:2503.20783).
        eps: added to the unbiased standard deviation.
        shard: this rank's rows of the batch.

    Returns:
        (B, T), 0 under the mask. A group of one keeps its score (mean 0, std 1).

    Raises:
        NumericsError: no sequences, everything is masked, or shapes do not fit.
    """
    batch = GroupScores.gather(scores, mask, group_ids, shard)
    if not normalize_by_std:
        return batch.spread(batch.deviation)
    require_range("eps", eps, above=0.0)
    return batch.spread(batch.deviation / (batch.std + eps))


def dr_grpo(scores: Tensor, mask: Tensor, group_ids: Tensor, *, shard: RowShard = ALL_ROWS) -> Tensor:
    """s - mean_g on every token: `grpo` without the division (Dr. GRPO, arXiv:2503.20783)."""
    return grpo(scores, mask, group_ids, normalize_by_std=False, shard=shard)


def rloo(scores: Tensor, mask: Tensor, group_ids: Tensor, *, shard: RowShard = ALL_ROWS) -> Tensor:
    """The score minus the mean of the others, (s - mean_g) n / (n - 1) (RLOO, arXiv:2402.14740).

    Arguments and results as `grpo`.
    """
    batch = GroupScores.gather(scores, mask, group_ids, shard)
    sizes = batch.groups.sizes[batch.groups.row]
    # A group of one has mean 0, and 1 / 1 as its factor.
    return batch.spread(batch.deviation * (sizes / (sizes - 1).clamp(min=1)))


def opo(scores: Tensor, mask: Tensor, group_ids: Tensor, *, shard: RowShard = ALL_ROWS) -> Tensor:
    """The score minus the group's mean weighted by length (OPO, arXiv:2505.23585).

    Arguments and results as `grpo`.
    """
    batch = GroupScores.gather(scores, mask, group_ids, shard)
    baseline = batch.groups.mean(batch.scores, batch.lengths.to(batch.scores.dtype))
    return batch.spread(batch.scores - baseline[batch.groups.row])


def gpg(scores: Tensor, mask: Tensor, group_ids: Tensor, *, shard: RowShard = ALL_ROWS) -> Tensor:
    """(B / number of non-zero scores) (s - mean_g), over all ranks' sequences (GPG, arXiv:2504.02546).

    Scores that are all 0 give 0. Arguments and results as `grpo`.
    """
    batch = GroupScores.gather(scores, mask, group_ids, shard)
    num_signals = torch.count_nonzero(batch.scores).clamp(min=1)
    return batch.spread(batch.deviation * (batch.scores.numel() / num_signals))


def pass_at_k(
    scores: Tensor, mask: Tensor, group_ids: Tensor, eps: float = 1e-6, *, shard: RowShard = ALL_ROWS
) -> Tensor:
    """The group's best gets (best - second best) / (std_g + eps), the rest 0 (arXiv:2503.19595).

    Arguments and results as `grpo`.

    Raises:
        NumericsError: a group of one.
    """
    require_range("eps", eps, above=0.0)
    batch = GroupScores.gather(scores, mask, group_ids, shard)
    groups = batch.groups
    if int(groups.sizes.min().item()) < 2:
        raise NumericsError(
            "pass_at_k compares the best sample of a group with the second best, and a group has one "
            "sample; set rollout.n to 2 or more"
        )
    best, place = groups.table(batch.scores, -torch.inf).topk(2, dim=-1)
    gain = (best[:, 0] - best[:, 1]) / (groups.std(batch.scores) + eps)
    return batch.spread(torch.where(groups.column == place[groups.row, 0], gain[groups.row], 0.0))


def reinforce_plus_plus_baseline(
    scores: Tensor, mask: Tensor, group_ids: Tensor, *, shard: RowShard = ALL_ROWS
) -> Tensor:
    """whiten((s - mean_g) mask) mask over the batch's tokens (REINFORCE++-baseline, arXiv:2501.03262).

    Arguments and results as `grpo`.
    """
    deviation = dr_grpo(scores, mask, group_ids, shard=shard)
    return keep(masked_whiten(deviation, mask, shard.all_reduce), mask)


def return_to_go(token_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each token on, (B, T); not discounted over masked positions."""
    require_same_shape(token_rewards=token_rewards, mask=mask)
    require_positions(mask)
    require_range("gamma", gamma, at_least=0.0, at_most=1.0)
    return discounted_sums(full_precision(token_rewards.detach()), mask, gamma)


def reinforce_plus_plus(
    token_rewards: Tensor, mask: Tensor, gamma: float, *, shard: RowShard = ALL_ROWS
) -> Tensor:
    """Return-to-go, whitened over the batch, times mask (REINFORCE++, arXiv:2501.03262).

    Args:
        token_rewards: (B, T), usually with the KL in the reward.
        mask: (B, T).
        gamma: discount per token, in [0, 1].
        shard: this rank's rows of the batch.

    Returns:
        (B, T), 0 under the mask.

    Raises:
        NumericsError: fewer than two tokens are unmasked.
    """
    returns = return_to_go(token_rewards, mask, gamma)
    return keep(masked_whiten(returns, mask, shard.all_reduce), mask)


def remax(token_rewards: Tensor, mask: Tensor, greedy_scores: Tensor) -> Tensor:
    """Undiscounted return-to-go minus the score of the prompt's greedy rollout (ReMax, arXiv:2310.10505).

    Args:
        token_rewards: (B, T).
        mask: (B, T).
        greedy_scores: (B,).

    Returns:
        (B, T), 0 under the mask.
    """
    require_rows(mask.shape[0], greedy_scores=greedy_scores)
    baseline = full_precision(greedy_scores.detach()).unsqueeze(-1)
    return keep(return_to_go(token_rewards, mask, 1.0) - baseline, mask)
