"""`algorithm.adv_estimator`: what each advantage estimator needs; the learner has the functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimatorTraits:
    """What an advantage estimator needs.

    Attributes:
        options: its function's options by argument, each the name of a key of `algorithm.*`.
        needs_critic: it reads values.
        needs_greedy: it reads the score of a greedy answer to each prompt.
        min_samples: the smallest rollout.n that it can use.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    needs_critic: bool = False
    needs_greedy: bool = False
    min_samples: int = 1


ADV_ESTIMATORS: Mapping[str, EstimatorTraits] = {
    "gae": EstimatorTraits(options={"gamma": "gamma", "lam": "lam"}, needs_critic=True),
    "vapo": EstimatorTraits(
        options={"gamma": "gamma", "lam_policy": "lam_policy", "lam_critic": "lam_critic", "alpha": "alpha"},
        needs_critic=True,
    ),
    "grpo": EstimatorTraits(options={"normalize_by_std": "norm_adv_by_std_in_grpo"}),
    "dr_grpo": EstimatorTraits(),
    "rloo": EstimatorTraits(),
    "reinforce_plus_plus": EstimatorTraits(options={"gamma": "gamma"}),
    "reinforce_plus_plus_baseline": EstimatorTraits(),
    "remax": EstimatorTraits(needs_greedy=True),
    "opo": EstimatorTraits(),
    "gpg": EstimatorTraits(),
    "pass_at_k": EstimatorTraits(min_samples=2),
}
