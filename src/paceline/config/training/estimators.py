"""`algorithm.adv_estimator`: what each needs; `paceline.algorithms.advantages` has a function of its name."""

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
        compares_samples: its baseline is made of the other samples of a prompt, so that one alone teaches
            nothing: rollout.n is at least 2.
        of_group: its advantages follow from the samples of their own prompt alone.
    """

    options: tuple[str, ...] = ()
    needs_critic: bool = False
    needs_greedy: bool = False
    compares_samples: bool = False
    of_group: bool = False


ADV_ESTIMATORS: Mapping[str, EstimatorTraits] = {
    "gae": EstimatorTraits(options=("gamma", "lam"), needs_critic=True),
    "vapo": EstimatorTraits(options=("gamma", "lam_policy", "lam_critic", "alpha"), needs_critic=True),
    "grpo": EstimatorTraits(options=("normalize_by_std",), compares_samples=True, of_group=True),
    "dr_grpo": EstimatorTraits(compares_samples=True, of_group=True),
    "rloo": EstimatorTraits(compares_samples=True, of_group=True),
    "reinforce_plus_plus": EstimatorTraits(options=("gamma",)),
    "reinforce_plus_plus_baseline": EstimatorTraits(compares_samples=True),
    "remax": EstimatorTraits(needs_greedy=True, of_group=True),
    "opo": EstimatorTraits(compares_samples=True, of_group=True),
    "gpg": EstimatorTraits(compares_samples=True),
    "pass_at_k": EstimatorTraits(compares_samples=True, of_group=True),
}
