"""Lists the needs of each built-in advantage estimator; `paceline.algorithms.advantages` computes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Need = Literal["critic", "greedy", "group"]
"""What an algorithm may need of a run.

critic: values. greedy: the score of a greedy answer to each prompt. group: two samples or more of each
prompt, because it compares their scores.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimatorTraits:
    """What an advantage estimator takes and needs.

    Attributes:
        options: options that `algorithm.*` sets, by their names in `AlgorithmConfig.estimator_arguments`.
        needs: what a run must provide, as in `Algorithm.needs`.
        of_group: whether a prompt's advantages depend only on its own samples.
    """

    options: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    of_group: bool = False


ADV_ESTIMATORS: Mapping[str, EstimatorTraits] = {
    "gae": EstimatorTraits(options=("gamma", "lam"), needs=("critic",)),
    "vapo": EstimatorTraits(options=("gamma", "lam_policy", "lam_critic", "alpha"), needs=("critic",)),
    "grpo": EstimatorTraits(options=("normalize_by_std",), needs=("group",), of_group=True),
    "dr_grpo": EstimatorTraits(needs=("group",), of_group=True),
    "rloo": EstimatorTraits(needs=("group",), of_group=True),
    "reinforce_plus_plus": EstimatorTraits(options=("gamma",)),
    "reinforce_plus_plus_baseline": EstimatorTraits(needs=("group",)),
    "remax": EstimatorTraits(needs=("greedy",), of_group=True),
    "opo": EstimatorTraits(needs=("group",), of_group=True),
    "gpg": EstimatorTraits(needs=("group",)),
    "pass_at_k": EstimatorTraits(needs=("group",), of_group=True),
}
