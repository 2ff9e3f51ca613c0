"""`algorithm.adv_estimator`: what each advantage estimator needs; the learner has the functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimatorTraits:
    """What an advantage estimator needs.

    Attributes:
        options: its options that `algorithm.*` sets, by their names in `AlgorithmConfig.estimator_arguments`.
        needs_critic: it reads values.
        needs_greedy: it reads the score of a greedy answer to each prompt.
        min_samples: the smallest rollout.n that it can use.
    """

    options: tuple[str, ...] = ()
    needs_critic: bool = False
    needs_greedy: bool = False
    min_samples: int = 1


ADV_ESTIMATORS: Mapping[str, EstimatorTraits] = {
    "gae": EstimatorTraits(options=("gamma", "lam"), needs_critic=True),
    "vapo": EstimatorTraits(options=("gamma", "lam_policy", "lam_critic", "alpha"), needs_critic=True),
    "grpo": EstimatorTraits(options=("normalize_by_std",)),
    "dr_grpo": EstimatorTraits(),
    "rloo": EstimatorTraits(),
    "reinforce_plus_plus": EstimatorTraits(options=("gamma",)),
    "reinforce_plus_plus_baseline": EstimatorTraits(),
    "remax": EstimatorTraits(needs_greedy=True),
    "opo": EstimatorTraits(),
    "gpg": EstimatorTraits(),
    "pass_at_k": EstimatorTraits(min_samples=2),
}
