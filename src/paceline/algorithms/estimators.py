"""What an advantage estimator reads and returns, and how the learner calls the functions of `advantages`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from paceline.algorithms import advantages
from paceline.algorithms.statistics import ALL_ROWS, RowShard, keep, masked_whiten
from paceline.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EstimatorInputs:
    """This rank's rows of a step's batch.

    Attributes:
        scores: (B,) from `kl.penalized_scores`.
        token_rewards: (B, T) from `kl.token_rewards`; their sums are the scores up to rounding, so that
            samples with equal scores are equal in `scores` alone.
        mask: (B, T).
        group_ids: (B,) integers that mean the same on every rank.
        values: (B, T); None without a critic.
        greedy_scores: (B,), of the greedy answer to each row's prompt; None where there are none.
        shard: where the rows lie in the whole batch.
    """

    scores: Tensor
    token_rewards: Tensor
    mask: Tensor
    group_ids: Tensor
    values: Tensor | None = None
    greedy_scores: Tensor | None = None
    shard: RowShard = ALL_ROWS


class Estimates(NamedTuple):
    """Advantages (B, T), 0 under the mask, and the critic's targets (B, T), None without a critic."""

    advantages: Tensor
    returns: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimator:
    """An advantage estimator as the learner calls it.

    Attributes:
        function: `f(inputs, **options) -> Estimates`.
        needs: which of "values" and "greedy_scores" it reads.
    """

    function: Callable[..., Estimates]
    needs: tuple[str, ...] = ()

    def __call__(self, inputs: EstimatorInputs, options: Mapping[str, Any]) -> Estimates:
        """The estimates of this rank's rows, equal to those of the whole batch computed at once.

        Raises:
            ConfigError: an input that it needs is not there.
            NumericsError: too few tokens to whiten, a group is too small, or shapes differ.
        """
        for name in self.needs:
            if getattr(inputs, name) is None:
                raise ConfigError(f"the advantage estimator needs {name}, which this batch does not have")
        return self.function(inputs, **options)


def of_groups(function: Callable[..., Tensor]) -> Estimator:
    """Makes an estimator from `f(scores, mask, group_ids, **options, shard)`, of a group's samples."""

    def call(inputs: EstimatorInputs, **options: Any) -> Estimates:
        return Estimates(
            function(inputs.scores, inputs.mask, inputs.group_ids, **options, shard=inputs.shard)
        )

    return Estimator(function=call)


def with_critic(function: Callable[..., tuple[Tensor, Tensor]]) -> Estimator:
    """Makes an estimator from `f(token_rewards, values, mask, **options) -> (advantages, returns)`.

    Whitens the advantages.
    """

    def call(inputs: EstimatorInputs, **options: Any) -> Estimates:
        raw, returns = function(inputs.token_rewards, inputs.values, inputs.mask, **options)
        whitened = masked_whiten(raw, inputs.mask, inputs.shard.all_reduce)
        return Estimates(keep(whitened, inputs.mask), returns)

    return Estimator(function=call, needs=("values",))


def reinforce_plus_plus(inputs: EstimatorInputs, gamma: float) -> Estimates:
    """Calls `advantages.reinforce_plus_plus` with the inputs' tensors."""
    return Estimates(
        advantages.reinforce_plus_plus(inputs.token_rewards, inputs.mask, gamma, shard=inputs.shard)
    )


def remax(inputs: EstimatorInputs) -> Estimates:
    """Calls `advantages.remax` with the inputs' tensors."""
    assert inputs.greedy_scores is not None
    return Estimates(advantages.remax(inputs.token_rewards, inputs.mask, inputs.greedy_scores))
