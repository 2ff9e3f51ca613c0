"""Estimates the KL between policies, adds it to rewards, and controls its coefficient."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from paceline.algorithms.checks import require_range, require_rows, require_same_shape
from paceline.algorithms.statistics import full_precision, keep
from paceline.core.errors import ConfigError, NumericsError


def k1(difference: Tensor) -> Tensor:
    """Returns d: unbiased, and negative on about half of the tokens."""
    return difference


def absolute(difference: Tensor) -> Tensor:
    """Estimates the divergence as |d|."""
    return difference.abs()


def k2(difference: Tensor) -> Tensor:
    """Returns d^2 / 2: biased, never negative; on policy its gradient is that of the true KL."""
    return 0.5 * difference.square()


def k3(difference: Tensor) -> Tensor:
    """Returns exp(x) - x - 1 with x = clip(-d, -20, 20), clipped to [-10, 10]: unbiased, never negative."""
    x = torch.clamp(-difference, -20.0, 20.0)
    return torch.clamp(torch.exp(x) - x - 1.0, -10.0, 10.0)


KL_ESTIMATES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "kl": k1,
    "mse": k2,
    "low_var_kl": k3,
}


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Estimates KL(policy || reference) per token, on tokens that the policy sampled.

    With d = log_probs - ref_log_probs the kinds are `k1` (alias kl) d, `abs` |d|, `k2` (mse) d^2/2 and `k3`
    (low_var_kl) exp(-d) + d - 1, clipped: Schulman 2020, "Approximating KL divergence"
    (http://joschu.net/blog/kl-approx.html). A trailing `+` keeps the value of the kind and takes the
    gradient of k2. On policy, that gradient of the KL is unbiased. The gradient of k1 is 0 on average, and
    that of k3 belongs to the reverse KL.

    Args:
        log_probs: any shape, differentiated.
        ref_log_probs: the shape of log_probs.
        kind: a name or alias above, with or without `+`.

    Returns:
        The shape of log_probs.

    Raises:
        ConfigError: unknown kind.
        NumericsError: shapes differ.
    """
    require_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs)
    name = kind.removesuffix("+")
    if name not in KL_ESTIMATES:
        raise ConfigError(
            f"KL estimate {kind!r} is not known; choose one of {', '.join(KL_ESTIMATES)}, each also with a "
            "trailing +"
        )
    difference = full_precision(log_probs) - full_precision(ref_log_probs)
    estimate = KL_ESTIMATES[name](difference)
    if not kind.endswith("+"):
        return estimate
    carrier = k2(difference)
    return estimate.detach() + (carrier - carrier.detach())


def token_rewards(
    scores: Tensor,
    mask: Tensor,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    placed: Tensor | None = None,
) -> Tensor:
    """Returns rewards per token: the score on the policy's last token, minus kl_coef times each token's KL.

    If parts of a score are placed on tokens, the last token gets the rest.

    Args:
        scores: (B,) sequence scores.
        mask: (B, T).
        kl: (B, T) estimates from the old and the reference log-probs; None for no KL in the reward.
        kl_coef: beta.
        placed: (B, T), parts of the scores; parts under the mask go to the last token.

    Returns:
        (B, T), 0 under the mask; no gradient.

    Raises:
        NumericsError: a sequence has no token that could carry its score, or shapes differ.
    """
    require_rows(mask.shape[0], scores=scores)
    require_same_shape(mask=mask, kl=kl)
    kept = mask.bool()
    empty = (~kept.any(-1)).nonzero().flatten().tolist()
    if empty:
        raise NumericsError(
            f"sequences {empty[:8]} have no unmasked token to carry their score; drop them from the batch"
        )
    positions = torch.arange(mask.shape[-1], device=mask.device)
    last = torch.where(kept, positions, -1).amax(-1, keepdim=True)
    score = full_precision(scores.detach()).unsqueeze(-1)
    rewards = torch.where(positions == last, score, 0.0)
    if placed is not None:
        parts = torch.where(kept & (positions != last), full_precision(placed.detach()), 0.0)
        rewards = torch.where(positions == last, score - parts.sum(-1, keepdim=True), parts)
    return rewards if kl is None else rewards - kl_coef * keep(kl.detach(), mask)


def penalized_scores(scores: Tensor, mask: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """Returns scores minus kl_coef times each sequence's summed KL, which group estimators compare.

    The sum is taken in float64, so that padding, which differs between ranks, does not change its rounding.

    Args:
        scores: (B,) sequence scores.
        mask: (B, T).
        kl: (B, T) as in `token_rewards`; None for no KL in the reward.
        kl_coef: beta.

    Returns:
        (B,); no gradient.

    Raises:
        NumericsError: shapes differ.
    """
    require_rows(mask.shape[0], scores=scores)
    require_same_shape(mask=mask, kl=kl)
    scores = full_precision(scores.detach())
    if kl is None:
        return scores
    penalties = kl_coef * keep(kl.detach(), mask).double().sum(-1)
    return (scores.double() - penalties).to(scores.dtype)


class FixedKLController:
    """Keeps the coefficient at its configured value."""

    def __init__(self, kl_coef: float) -> None:
        require_range("kl_coef", kl_coef, at_least=0.0)
        self.value = float(kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Does nothing: the coefficient is fixed."""

    def state_dict(self) -> dict[str, float]:
        """Returns nothing: the coefficient is configuration, which may change when a run continues."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Does nothing: there is no state."""


class AdaptiveKLController:
    """Adjusts the coefficient to bring the KL near its target (arXiv:1909.08593, section 2.2).

    value *= 1 + clip(current_kl / target_kl - 1, -0.2, 0.2) n_steps / horizon, after the step has used the
    value.

    Args:
        kl_coef: the initial value, above 0 (from 0 it would never change).
        target_kl: above 0, in nats per token.
        horizon: above 0, in sequences.
    """

    def __init__(self, kl_coef: float, target_kl: float, horizon: float) -> None:
        require_range("kl_coef", kl_coef, above=0.0)
        require_range("target_kl", target_kl, above=0.0)
        require_range("horizon", horizon, above=0.0)
        self.value = float(kl_coef)
        self.target_kl = float(target_kl)
        self.horizon = float(horizon)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Moves the value after a step of `n_steps` sequences.

        `current_kl` is the mean over sequences of each sequence's masked mean.

        Raises:
            NumericsError: current_kl is not finite; the value is left as it was.
        """
        if not abs(current_kl) < float("inf"):
            raise NumericsError(f"the KL of this step is {current_kl}; the coefficient stays {self.value:g}")
        error = min(max(current_kl / self.target_kl - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Returns the value for a checkpoint; target and horizon are configuration."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restores the checkpoint's value; keeps the configured one if the checkpoint has none."""
        self.value = float(state.get("value", self.value))


KLController = FixedKLController | AdaptiveKLController
