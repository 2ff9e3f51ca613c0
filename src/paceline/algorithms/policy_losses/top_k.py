"""Distributions over a teacher's K likeliest tokens and, as one more outcome, all other tokens together."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.algorithms.checks import require_same_shape

REST_FLOOR = 1e-6
"""The smallest probability of the other tokens: in float32, one minus a sum is known to about 1e-7."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TopK:
    """What policy and teacher say about the same K + 1 outcomes of each token, as log-probs at temperature 1.

    The outcomes are the teacher's K likeliest tokens there, the likeliest first, and all other tokens
    together. Masked entries are undefined.

    Attributes:
        policy: (B, T, K + 1), with its graph.
        teacher: (B, T, K + 1).
    """

    policy: Tensor
    teacher: Tensor

    def __post_init__(self) -> None:
        require_same_shape(policy=self.policy, teacher=self.teacher)


def log_rest(log_probs: Tensor) -> Tensor:
    """Returns the log-probs (...) of all tokens but K, at least log(`REST_FLOOR`).

    Args:
        log_probs: (..., K), log-probs of distinct tokens.
    """
    rest = 1.0 - log_probs.double().exp().sum(-1)
    return rest.clamp(min=REST_FLOOR).log().to(log_probs.dtype)
