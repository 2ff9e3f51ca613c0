"""Advantage estimators: how much better a token did than was to be expected.

B sequences, T positions, mask 1 on tokens of the policy; a hole in the mask (a tool's tokens) is stepped over as if
it were not there. None of the results carries a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.core.errors import NumericsError
from paceline.learner.algorithms import group_baselines
from paceline.learner.algorithms.checks import require_range, require_rows, require_same_shape
from paceline.learner.algorithms.statistics import full_precision, keep, masked_whiten

Whiten = Callable[[Tensor, Tensor], Tensor]


def gae(
    token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), from the last token to the first.

    delta = r_t + gamma V' - V_t and A_t = delta + gamma lam A'. On a masked position V' and A' pass through unchanged.

    Args:
        token_rewards: (B, T).
        values: (B, T).
        mask: (B, T).
        gamma: discount for each token, in [0, 1].
        lam: lambda in [0, 1], or one for each sequence, (B,).

    Returns:
        advantages (B, T), not whitened, and returns = advantages + values, (B, T). Under the mask both are the
        carried values and mean nothing.
    """
    require_same_shape(token_rewards=token_rewards, values=values, mask=mask)
    _require_positions(mask)
    require_range("gamma", gamma, at_least=0.0, at_most=1.0)
    if isinstance(lam, Tensor):
        require_rows(mask.shape[0], lam=lam)
        lam = lam.to(full_precision(values).dtype)
    else:
        require_range("lam", lam, at_least=0.0, at_most=1.0)
    rewards, values, kept = (
        full_precision(token_rewards.detach()),
        full_precision(values.detach()),
        mask.bool(),
    )
    next_value = torch.zeros_like(values[:, 0])
    advantage = torch.zeros_like(next_value)
    backwards = []
    for reward, value, here in zip(
        reversed(rewards.unbind(-1)), reversed(values.unbind(-1)), reversed(kept.unbind(-1)), strict=True
    ):
        delta = reward + gamma * next_value - value
        advantage = torch.where(here, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(here, value, next_value)
        backwards.append(advantage)
    advantages = torch.stack(backwards[::-1], dim=-1)
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

    The advantages are made with `lam_policy`, or where that is None with `length_adaptive_lambda` of each response;
    the critic's targets with `lam_critic`. Shapes and the rest as `gae`.
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
    scores: Tensor, mask: Tensor, group_ids: Tensor, normalize_by_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Group-relative advantages, (s - mean_g) / (std_g + eps) on every token (arXiv:2402.03300, section 4.1.2).

    Args:
        scores: (B,).
        mask: (B, T).
        group_ids: (B,) integers: equal for samples of one prompt.
        normalize_by_std: False leaves out the division: Dr. GRPO (arXiv:2503.20783).
        eps: added to the unbiased standard deviation.

    Returns:
        (B, T), 0 under the mask. A group of one keeps its score (mean 0, std 1).

    Raises:
        NumericsError: no sequences, everything is masked, or shapes do not fit.
    """
    return _spread(group_baselines.grpo(scores, _lengths(mask), group_ids, normalize_by_std, eps), mask)


def rloo(scores: Tensor, mask: Tensor, group_ids: Tensor) -> Tensor:
    """Leave-one-out: (s - mean_g) n / (n - 1) on every token (RLOO, arXiv:2402.14740); shapes as `grpo`."""
    return _spread(group_baselines.rloo(scores, _lengths(mask), group_ids), mask)


def opo(scores: Tensor, mask: Tensor, group_ids: Tensor) -> Tensor:
    """Against the group's mean weighted by length (OPO, arXiv:2505.23585); shapes as `grpo`."""
    return _spread(group_baselines.opo(scores, _lengths(mask), group_ids), mask)


def gpg(scores: Tensor, mask: Tensor, group_ids: Tensor) -> Tensor:
    """(B / number of non-zero scores) (s - mean_g) (GPG, arXiv:2504.02546); shapes as `grpo`."""
    return _spread(group_baselines.gpg(scores, _lengths(mask), group_ids), mask)


def pass_at_k(scores: Tensor, mask: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    """The group's best gets (best - second best) / (std_g + eps), the rest 0 (arXiv:2503.19595); shapes as `grpo`.

    Raises:
        NumericsError: a group of one.
    """
    return _spread(group_baselines.pass_at_k(scores, _lengths(mask), group_ids, eps), mask)


def reinforce_plus_plus_baseline(
    scores: Tensor, mask: Tensor, group_ids: Tensor, *, whiten: Whiten = masked_whiten
) -> Tensor:
    """whiten((s - mean_g) mask) mask over the batch (REINFORCE++-baseline, arXiv:2501.03262); shapes as `grpo`."""
    spread = _spread(group_baselines.group_mean(scores, _lengths(mask), group_ids), mask)
    return keep(whiten(spread, mask), mask)


def return_to_go(token_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each token on, (B, T); a masked position carries it through undiscounted."""
    require_same_shape(token_rewards=token_rewards, mask=mask)
    _require_positions(mask)
    require_range("gamma", gamma, at_least=0.0, at_most=1.0)
    rewards, kept = full_precision(token_rewards.detach()), mask.bool()
    running = torch.zeros_like(rewards[:, 0])
    backwards = []
    for reward, here in zip(reversed(rewards.unbind(-1)), reversed(kept.unbind(-1)), strict=True):
        running = torch.where(here, reward + gamma * running, running)
        backwards.append(running)
    return torch.stack(backwards[::-1], dim=-1)


def reinforce_plus_plus(
    token_rewards: Tensor, mask: Tensor, gamma: float, *, whiten: Whiten = masked_whiten
) -> Tensor:
    """Return-to-go, whitened over the batch, times mask (REINFORCE++, arXiv:2501.03262).

    Args:
        token_rewards: (B, T), usually with the KL in the reward.
        mask: (B, T).
        gamma: discount for each token, in [0, 1].
        whiten: whitens over the batch; over several ranks one made of `whiten_across`.

    Returns:
        (B, T), 0 under the mask.

    Raises:
        NumericsError: fewer than two tokens are unmasked.
    """
    return keep(whiten(return_to_go(token_rewards, mask, gamma), mask), mask)


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


def _require_positions(mask: Tensor) -> None:
    if mask.dim() != 2 or mask.shape[-1] == 0:
        raise NumericsError(f"mask must have shape (B, T) with T at least 1, not {tuple(mask.shape)}")


def _lengths(mask: Tensor) -> Tensor:
    _require_positions(mask)
    return mask.bool().sum(-1)


def _spread(per_sequence: Tensor, mask: Tensor) -> Tensor:
    if not bool(mask.any()):
        raise NumericsError("all tokens are masked: no advantage would be used; look at the response mask")
    return torch.where(mask.bool(), per_sequence.unsqueeze(-1), 0.0)
