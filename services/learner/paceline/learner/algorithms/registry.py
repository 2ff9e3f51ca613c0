"""The algorithms by name: adding one is a function and a line here.

Tables: ADV_ESTIMATORS, POLICY_LOSSES, KL_ESTIMATES (of `kl`), LOSS_AGG_MODES. `look_up` names what there is where a
name is not known. `select_options` takes from all configured options those that a function has parameters for, so that
one call site serves every algorithm.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.learner.algorithms import advantages as token_level
from paceline.learner.algorithms import aggregation, kl, policy_losses
from paceline.learner.algorithms import group_baselines as sequence_level
from paceline.learner.algorithms.policy_losses.base import LossFunction

Entry = TypeVar("Entry")

LOSS_TENSORS = ("log_probs", "old_log_probs", "advantages", "mask", "selected")
ESTIMATOR_TENSORS = ("scores", "lengths", "group_ids", "token_rewards", "values", "greedy_scores", "mask")


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimator:
    """One advantage estimator: exactly one of the two functions, and what is done with its result.

    Attributes:
        per_sequence: `f(scores, lengths, group_ids, **options) -> (B,)` over the whole batch of all ranks.
        per_token: `f(**tensors, **options) -> advantages (B, T)` or `(advantages, returns)`; its tensors are those of
            its parameters that ESTIMATOR_TENSORS names. It looks at one sequence at a time.
        whiten: whether the advantages are whitened over the batch afterwards.
    """

    per_sequence: Callable[..., Tensor] | None = None
    per_token: Callable[..., Tensor | tuple[Tensor, Tensor]] | None = None
    whiten: bool = False

    @property
    def function(self) -> Callable[..., Any]:
        """The one function that is set."""
        function = self.per_sequence or self.per_token
        if function is None or (self.per_sequence and self.per_token):
            raise ConfigError("an estimator has exactly one of per_sequence and per_token")
        return function

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the tensors that it reads, in the order of ESTIMATOR_TENSORS: "values" tells that it takes a critic.

        The order is the same in every process, as a set's is not: ranks gather these tensors one after the other.
        """
        parameters = inspect.signature(self.function).parameters
        return tuple(name for name in ESTIMATOR_TENSORS if name in parameters)


ADV_ESTIMATORS: Mapping[str, Estimator] = {
    "gae": Estimator(per_token=token_level.gae, whiten=True),
    "vapo": Estimator(per_token=token_level.vapo, whiten=True),
    "grpo": Estimator(per_sequence=sequence_level.grpo),
    "dr_grpo": Estimator(per_sequence=sequence_level.group_mean),
    "rloo": Estimator(per_sequence=sequence_level.rloo),
    "reinforce_plus_plus": Estimator(per_token=token_level.return_to_go, whiten=True),
    "reinforce_plus_plus_baseline": Estimator(per_sequence=sequence_level.group_mean, whiten=True),
    "remax": Estimator(per_token=token_level.remax),
    "opo": Estimator(per_sequence=sequence_level.opo),
    "gpg": Estimator(per_sequence=sequence_level.gpg),
    "pass_at_k": Estimator(per_sequence=sequence_level.pass_at_k),
}

POLICY_LOSSES: Mapping[str, LossFunction] = {
    "ppo_clip": LossFunction.of_tensors(policy_losses.ppo_clip, "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"),
    "gspo": LossFunction.of_tensors(policy_losses.gspo, "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"),
    "cispo": LossFunction.of_tensors(policy_losses.cispo, "pg_clipfrac", "ppo_kl"),
    "geo_mean": LossFunction.of_tensors(policy_losses.geo_mean, "pg_clipfrac", "ppo_kl"),
    "kl_cov": LossFunction.of_tensors(policy_losses.kl_cov, "cov_frac", "ppo_kl", selects_tokens=True),
    "clip_cov": LossFunction.of_tensors(
        policy_losses.clip_cov, "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "cov_frac", selects_tokens=True
    ),
    "gpg": LossFunction.of_tensors(policy_losses.gpg, "ppo_kl"),
    "sapo": LossFunction.of_tensors(policy_losses.sapo, "ppo_kl"),
}

LOSS_AGG_MODES: tuple[str, ...] = aggregation.MODES


def adv_estimator(name: str) -> Estimator:
    """The estimator of that name; ConfigError lists the names if there is none."""
    return look_up(ADV_ESTIMATORS, name, "algorithm.adv_estimator")


def kl_kind(name: str) -> str:
    """`name` if `kl_estimate` knows it, with or without a trailing +; ConfigError lists the names if not."""
    look_up(kl.KL_ESTIMATES, name.removesuffix("+"), "KL estimate")
    return name


def loss_agg_mode(name: str) -> str:
    """`name` if `aggregate` knows it; ConfigError lists the names if not."""
    return look_up({mode: mode for mode in LOSS_AGG_MODES}, name, "actor.loss_agg_mode")


def look_up(table: Mapping[str, Entry], name: str, key: str) -> Entry:
    """table[name].

    Raises:
        ConfigError: there is no such name; says which configuration key and which names there are.
    """
    try:
        return table[name]
    except KeyError:
        raise ConfigError(f"{key} {name!r} is not known; choose one of {', '.join(sorted(table))}") from None


def option_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters of an estimator or loss that are options and not tensors, in order."""
    tensors = {*LOSS_TENSORS, *ESTIMATOR_TENSORS}
    return tuple(name for name in inspect.signature(function).parameters if name not in tensors)


def configured_options(function: Callable[..., Any], section: object) -> dict[str, Any]:
    """The options of an estimator or loss that a section of the configuration has values for, found by their names.

    Raises:
        ConfigError: an option without default is not there.
    """
    names = [name for name in option_names(function) if hasattr(section, name)]
    return select_options(function, {name: getattr(section, name) for name in names})


def select_options(function: Callable[..., Any], available: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `available` that `function` has parameters for, by name.

    Raises:
        ConfigError: a parameter without default is not available.
    """
    chosen = {}
    for name in option_names(function):
        if name in available:
            chosen[name] = available[name]
        elif inspect.signature(function).parameters[name].default is inspect.Parameter.empty:
            raise ConfigError(
                f"{function.__name__} needs the option {name!r}; options given: {', '.join(sorted(available)) or 'none'}"
            )
    return chosen
