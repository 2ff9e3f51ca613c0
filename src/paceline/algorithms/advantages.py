"""Estimates advantages: how much better a token did than expected.

B sequences, T positions, mask 1 on tokens of the policy. Masked tokens in between (a tool's) are skipped.
Results carry no gradient.

Every estimator is called `f(rows: SampleRows, **options)` and returns `Estimates`. An estimator that
reads other rows does so through `rows.shard`. If the batch is spread over several ranks, each rank passes its
own rows and gets the result that the full batch would give for them.
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
from paceline.algorithms.rows import Estimates, SampleRows
from paceline.algorithms.scans import discounted_sums, next_unmasked
from paceline.algorithms.statistics import full_precision, keep, masked_whiten
from paceline.core.errors import NumericsError

__all__ = [
    "dr_grpo",
    "gae",
    "generalized_advantages",
    "gpg",
    "grpo",
    "length_adaptive_lambda",
    "opo",
    "pass_at_k",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "return_to_go",
    "rloo",
    "vapo",
]


def generalized_advantages(
    token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Computes generalised advantage estimation (arXiv:1506.02438, eq. 16), from the last token to the first.

    delta = r_t + gamma V' - V_t and A_t = delta + gamma lam A'. A masked position passes V' and A' on
    unchanged.

    Args:
        token_rewards: (B, T).
        values: (B, T).
        mask: (B, T).
        gamma: discount per token, in [0, 1].
        lam: lambda in [0, 1], or one per sequence, (B,).

    Returns:
        advantages (B, T), not whitened, and returns = advantages + values, (B, T). Masked entries are
        undefined.
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


def gae(rows: SampleRows, gamma: float, lam: float) -> Estimates:
    """Returns `generalized_advantages`, whitened over the batch, and the critic's targets."""
    raw, returns = generalized_advantages(rows.token_rewards, rows.critic_values, rows.mask, gamma, lam)
    return Estimates(_whitened(raw, rows), returns)


def _whitened(advantages: Tensor, rows: SampleRows) -> Tensor:
    return keep(masked_whiten(advantages, rows.mask, rows.shard.all_reduce), rows.mask)


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """Returns VAPO's lambda per sequence, 1 - 1 / (alpha l) (arXiv:2504.05118), kept in [0, 1]; (B,) to (B,).

    For responses shorter than 1 / alpha tokens the formula is negative, and 0 is used.
    """
    require_range("alpha", alpha, above=0.0)
    return (1.0 - 1.0 / (alpha * full_precision(lengths).clamp(min=1.0))).clamp(0.0, 1.0)


def vapo(
    rows: SampleRows,
    gamma: float = 1.0,
    lam_policy: float | None = None,
    lam_critic: float = 1.0,
    alpha: float = 0.05,
) -> Estimates:
    """Computes decoupled, length-adaptive GAE (VAPO, arXiv:2504.05118; VC-PPO, arXiv:2503.01491).

    The advantages use `lam_policy` (if None, each response's `length_adaptive_lambda`), and the critic's
    targets use `lam_critic`. Everything else is as in `gae`.
    """
    values, mask = rows.critic_values, rows.mask
    lam: float | Tensor
    if lam_policy is None:
        lam = length_adaptive_lambda(mask.bool().sum(-1).to(full_precision(values).dtype), alpha)
    else:
        lam = lam_policy
    raw, _ = generalized_advantages(rows.token_rewards, values, mask, gamma, lam)
    _, returns = generalized_advantages(rows.token_rewards, values, mask, gamma, lam_critic)
    return Estimates(_whitened(raw, rows), returns)


def grpo(rows: SampleRows, normalize_by_std: bool = True, eps: float = 1e-6) -> Estimates:
    """Returns (s - mean_g) / (std_g + eps) on every token (GRPO, arXiv:2402.03300, section 4.1.2).

    Args:
        rows: the rows; scores, mask and group_ids are read.
        normalize_by_std: False omits the division, as in Dr. GRPO (arXiv:2503.20783).
        eps: added to the unbiased standard deviation.

    Returns:
        Advantages, 0 under the mask. A group of one keeps its score (mean 0, std 1).

    Raises:
        NumericsError: no sequences, everything is masked, or shapes do not fit.
    """
    batch = GroupScores.gather(rows.scores, rows.mask, rows.group_ids, rows.shard)
    if not normalize_by_std:
        return Estimates(batch.spread(batch.deviation))
    require_range("eps", eps, above=0.0)
    return Estimates(batch.spread(batch.deviation / (batch.std + eps)))


def dr_grpo(rows: SampleRows) -> Estimates:
    """Returns s - mean_g on every token: `grpo` without the division (Dr. GRPO, arXiv:2503.20783)."""
    return grpo(rows, normalize_by_std=False)


def rloo(rows: SampleRows) -> Estimates:
    """Returns the score minus the mean of the group's others, (s - mean_g) n / (n - 1) (arXiv:2402.14740).

    Arguments and results as in `grpo`.
    """
    batch = GroupScores.gather(rows.scores, rows.mask, rows.group_ids, rows.shard)
    sizes = batch.groups.sizes[batch.groups.row]
    # A group of one has mean 0 and factor 1 / 1.
    return Estimates(batch.spread(batch.deviation * (sizes / (sizes - 1).clamp(min=1))))


def opo(rows: SampleRows) -> Estimates:
    """Returns the score minus the group's mean weighted by length (OPO, arXiv:2505.23585).

    Arguments and results as in `grpo`.
    """
    batch = GroupScores.gather(rows.scores, rows.mask, rows.group_ids, rows.shard)
    baseline = batch.groups.mean(batch.scores, batch.lengths.to(batch.scores.dtype))
    return Estimates(batch.spread(batch.scores - baseline[batch.groups.row]))


def gpg(rows: SampleRows) -> Estimates:
    """Returns (B / number of non-zero scores) (s - mean_g), over all ranks' sequences (arXiv:2504.02546).

    If all scores are 0, the result is 0. Arguments and results as in `grpo`.
    """
    batch = GroupScores.gather(rows.scores, rows.mask, rows.group_ids, rows.shard)
    num_signals = torch.count_nonzero(batch.scores).clamp(min=1)
    return Estimates(batch.spread(batch.deviation * (batch.scores.numel() / num_signals)))


def pass_at_k(rows: SampleRows, eps: float = 1e-6) -> Estimates:
    """Gives a group's best sample (best - second best) / (std_g + eps), the rest 0 (arXiv:2503.19595).

    Arguments and results as in `grpo`.

    Raises:
        NumericsError: a group has only one sample.
    """
    require_range("eps", eps, above=0.0)
    batch = GroupScores.gather(rows.scores, rows.mask, rows.group_ids, rows.shard)
    groups = batch.groups
    if int(groups.sizes.min().item()) < 2:
        raise NumericsError(
            "pass_at_k compares the best sample of a group with the second best, and a group has one "
            "sample; set rollout.n to 2 or more"
        )
    best, place = groups.table(batch.scores, -torch.inf).topk(2, dim=-1)
    gain = (best[:, 0] - best[:, 1]) / (groups.std(batch.scores) + eps)
    return Estimates(batch.spread(torch.where(groups.column == place[groups.row, 0], gain[groups.row], 0.0)))


def reinforce_plus_plus_baseline(rows: SampleRows) -> Estimates:
    """Returns s - mean_g, whitened over the batch's tokens (REINFORCE++-baseline, arXiv:2501.03262).

    Arguments and results as in `grpo`.
    """
    return Estimates(_whitened(dr_grpo(rows).advantages, rows))


def return_to_go(token_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Returns the discounted sum of rewards from each token on, (B, T); masked positions do not discount."""
    require_same_shape(token_rewards=token_rewards, mask=mask)
    require_positions(mask)
    require_range("gamma", gamma, at_least=0.0, at_most=1.0)
    return discounted_sums(full_precision(token_rewards.detach()), mask, gamma)


def reinforce_plus_plus(rows: SampleRows, gamma: float) -> Estimates:
    """Returns the return-to-go, whitened over the batch, times mask (REINFORCE++, arXiv:2501.03262).

    Args:
        rows: the rows; mask and token_rewards (usually with the KL in the reward) are read.
        gamma: discount per token, in [0, 1].

    Raises:
        NumericsError: fewer than two tokens are unmasked.
    """
    return Estimates(_whitened(return_to_go(rows.token_rewards, rows.mask, gamma), rows))


def remax(rows: SampleRows) -> Estimates:
    """Returns the undiscounted return-to-go minus the prompt's greedy score (ReMax, arXiv:2310.10505)."""
    greedy_scores = rows.scores_of_greedy
    require_rows(rows.mask.shape[0], greedy_scores=greedy_scores)
    baseline = full_precision(greedy_scores.detach()).unsqueeze(-1)
    return Estimates(keep(return_to_go(rows.token_rewards, rows.mask, 1.0) - baseline, rows.mask))
