"""From rewards to the advantages of a batch that may lie on several ranks: one call for every estimator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.learner.algorithms.registry import Estimator, select_options
from paceline.learner.algorithms.statistics import AllReduce, keep, masked_sum, whiten_across


def estimate_advantages(
    estimator: Estimator,
    options: Mapping[str, Any],
    *,
    token_rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor | None = None,
    values: Tensor | None = None,
    greedy_scores: Tensor | None = None,
    all_reduce: AllReduce = lambda sums: sums,
    gather: Callable[[Tensor], Tensor] = lambda rows: rows,
    rows: slice | Tensor = slice(None),
) -> tuple[Tensor, Tensor | None]:
    """Advantages of this rank's rows, equal to those of the whole batch computed at once.

    Args:
        estimator: from `registry.adv_estimator`.
        options: all configured options (gamma, lam, eps ...); those that the estimator has are taken.
        token_rewards: (B, T) from `kl.token_rewards`; estimators over sequences take each row's sum as its score.
        mask: (B, T).
        group_ids: (B,) integers that mean the same on every rank, for estimators over groups.
        values: (B, T), for estimators with a critic.
        greedy_scores: (B,), for remax.
        all_reduce: adds a small 1-D tensor over all ranks.
        gather: (B,) of this rank to (B_all,) of all ranks, in one order everywhere.
        rows: where this rank's rows lie in what `gather` gives: a slice, or their indices.

    Returns:
        advantages (B, T), 0 under the mask, whitened where the estimator says so; returns (B, T) for the critic, or
        None from an estimator without one.

    Raises:
        ConfigError: the estimator needs a tensor or an option that was not given.
        NumericsError: the batch has too few tokens to whiten, a group is too small, or shapes differ.
    """
    scores, lengths = masked_sum(token_rewards, mask, dim=-1), mask.bool().sum(-1)
    given = {
        "token_rewards": token_rewards,
        "mask": mask,
        "values": values,
        "greedy_scores": greedy_scores,
        "scores": scores,
        "lengths": lengths,
        "group_ids": group_ids,
    }
    tensors: dict[str, Tensor] = {}
    for name in estimator.needs:
        tensor = given[name]
        if tensor is None:
            raise ConfigError(
                f"the advantage estimator {estimator.function.__name__} needs {name}, which this batch has not"
            )
        tensors[name] = tensor
    chosen = select_options(estimator.function, options)
    returns: Tensor | None = None
    if estimator.per_sequence is not None:
        gathered = {name: gather(tensor) for name, tensor in tensors.items()}
        advantages = estimator.per_sequence(**gathered, **chosen)[rows].unsqueeze(-1).expand(mask.shape)
    else:
        result = estimator.function(**tensors, **chosen)
        advantages, returns = result if isinstance(result, tuple) else (result, None)
    if estimator.whiten:
        advantages = whiten_across(keep(advantages, mask), mask, all_reduce)
    return keep(advantages, mask), returns
