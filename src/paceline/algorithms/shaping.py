"""Penalises overlong responses before advantages are estimated, and resamples the batch afterwards."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.algorithms.checks import require_range
from paceline.algorithms.groups import Groups
from paceline.algorithms.statistics import full_precision
from paceline.core.errors import ConfigError, NumericsError

RESAMPLING_METHODS = ("pow", "max_min")


def overlong_penalty(lengths: Tensor, max_length: int, buffer_length: int, factor: float = 1.0) -> Tensor:
    """Returns min(-(len - (max_length - buffer_length)) / buffer_length factor, 0) (DAPO, eq. 13).

    Source: arXiv:2503.14476.

    Args:
        lengths: (B,) response lengths in tokens.
        max_length: the longest response allowed, in tokens.
        buffer_length: tokens before it over which the penalty grows from 0 to `factor`; in [1, max_length].
        factor: the penalty at max_length, at least 0.

    Returns:
        (B,) in [-factor, 0], to be added to the scores.
    """
    require_range("max_length", max_length, at_least=1)
    require_range("buffer_length", buffer_length, at_least=1, at_most=max_length)
    require_range("factor", factor, at_least=0.0)
    excess = full_precision(lengths) - (max_length - buffer_length)
    return torch.clamp(-excess / buffer_length * factor, max=0.0)


def resample_indices(
    scores: Tensor,
    method: str = "pow",
    power: float = 2.0,
    group_ids: Tensor | None = None,
    num_samples: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws the sequences of the resampled batch with replacement (PF-PPO, arXiv:2409.06957).

    Compute the advantages first, then index every tensor of the batch with the result (scores, log-probs,
    advantages). This way, each sample keeps the advantage that its complete group gives it.

    Args:
        scores: (B,).
        method: "pow": with probability proportional to |score|^power (to 1, if all scores are 0); "max_min":
            uniformly from the sequences with the best and the worst score.
        power: at least 0; 0 draws uniformly.
        group_ids: (B,) integers; "max_min" then takes the best and worst of each group instead of the batch.
        num_samples: number of draws; None for B.
        generator: a generator on the device of scores; it determines the draw.

    Returns:
        (num_samples,) indices into the batch.

    Raises:
        ConfigError: unknown method, or a number out of range.
        NumericsError: there are no scores, or a score is not finite.
    """
    if method not in RESAMPLING_METHODS:
        raise ConfigError(
            f"resampling method {method!r} is not known; choose one of {', '.join(RESAMPLING_METHODS)}"
        )
    require_range("power", power, at_least=0.0)
    if scores.dim() != 1 or scores.numel() == 0 or not bool(torch.isfinite(scores).all()):
        raise NumericsError("resampling needs a vector of at least one score, all finite")
    number = scores.numel() if num_samples is None else num_samples
    require_range("num_samples", number, at_least=1)
    scores = scores.detach().double()
    if method == "pow":
        # Dividing by the largest keeps powers from overflowing or all becoming 0.
        largest = scores.abs().max()
        weights = (scores.abs() / largest).pow(power) if bool(largest > 0) else torch.ones_like(scores)
    else:
        groups = Groups.of(torch.zeros_like(scores, dtype=torch.long) if group_ids is None else group_ids)
        best, worst = groups.table(scores, -torch.inf).amax(-1), groups.table(scores, torch.inf).amin(-1)
        weights = ((scores == best[groups.row]) | (scores == worst[groups.row])).double()
    return torch.multinomial(weights, number, replacement=True, generator=generator)
