"""The rows of a step's batch, which advantage estimators read, and the estimates that they return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from paceline.algorithms.statistics import ALL_ROWS, RowShard
from paceline.core.errors import ConfigError
from paceline.core.estimators import Need


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleRows:
    """This rank's rows of a step's batch: B sequences of T response positions.

    Attributes:
        scores: (B,) from `kl.penalized_scores`.
        token_rewards: (B, T) from `kl.token_rewards`; their sums equal the scores only up to rounding, so
            compare samples by `scores`.
        mask: (B, T).
        group_ids: (B,) integers that mean the same on every rank.
        log_probs: (B, T) each, by name: "rollout", the sampler's; "old", the policy's before the step's first
            update, and "reference", if the run computes them; each frozen network's by its name.
        values: (B, T); None without a critic.
        greedy_scores: (B,), scores of the greedy answer to each row's prompt; None without greedy answers.
        shard: which rows of the full batch these are.
    """

    scores: Tensor
    token_rewards: Tensor
    mask: Tensor
    group_ids: Tensor
    log_probs: Mapping[str, Tensor] = field(default_factory=dict)
    values: Tensor | None = None
    greedy_scores: Tensor | None = None
    shard: RowShard = ALL_ROWS

    @property
    def critic_values(self) -> Tensor:
        """The values; raises ConfigError without a critic."""
        return _present("values", "critic", self.values)

    @property
    def scores_of_greedy(self) -> Tensor:
        """The greedy scores; raises ConfigError if there are none."""
        return _present("greedy_scores", "greedy", self.greedy_scores)


class Estimates(NamedTuple):
    """Advantages (B, T), 0 under the mask, and the critic's targets (B, T), None without a critic."""

    advantages: Tensor
    returns: Tensor | None = None


def _present(name: str, need: Need, tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ConfigError(
            f"the advantage estimator needs {name}, which this batch does not have; with an estimator or "
            f"algorithm of your own, write algorithm.needs: [{need}]"
        )
    return tensor
