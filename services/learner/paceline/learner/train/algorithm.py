"""Makes the algorithm that a configuration names: built in, or the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from paceline.algorithms import advantages, policy_losses
from paceline.algorithms.algorithm import Algorithm, Estimator, LossFunction
from paceline.algorithms.users_own import own, trial
from paceline.algorithms.users_own.own_step import Agree, OwnAlgorithm
from paceline.config.run import RunConfig
from paceline.config.training.algorithm import REFERENCE
from paceline.config.training.policy_losses import CustomLoss
from paceline.core.errors import ConfigError
from paceline.core.guard import Action


def algorithm_of(
    config: RunConfig,
    clip_scale: float = 1.0,
    *,
    critic_alone: bool = False,
    agree: Agree = lambda verb: None,
) -> Algorithm:
    """Makes the algorithm of a step.

    Args:
        clip_scale: the guard's factor for options that are clip ranges.
        agree: raises on every rank unless all ranks call this verb of the user's own algorithm.

    Raises:
        ConfigError: a user's file lacks the configured function or class.
    """
    built_in = Algorithm(_estimator(config, critic_alone), _policy_loss(config, clip_scale))
    path = config.algorithm.path
    if path is None:
        return built_in
    kind, label = own.load_algorithm(path), f"algorithm {path!r}"
    options = _scaled(config.algorithm.options, kind.scalable, clip_scale)
    return OwnAlgorithm(label, kind(built_in.advantages, built_in.loss, options), agree)


def metric_names(config: RunConfig, loss: LossFunction) -> tuple[str, ...]:
    """Returns the names of the metrics of a policy loss."""
    return trial.metric_names(loss, names=_log_probs_of(config), needs=_needs_of(config))


def try_algorithm(config: RunConfig) -> None:
    """Calls the user's own parts of a run's algorithm on a few tokens.

    Raises:
        ConfigError: a part is missing, needs something that the run does not have, or cannot be trained with.
    """
    algorithm, chosen, loss = algorithm_of(config), config.algorithm, config.actor.policy_loss
    names, needs = _log_probs_of(config), _needs_of(config)
    if chosen.path is not None:
        label = f"algorithm {chosen.path!r}"
        _require_what_it_needs(config, own.load_algorithm(chosen.path), label)
        trial.try_step(label, algorithm, names=names, needs=needs)
        return
    if isinstance(loss, CustomLoss):
        trial.try_loss(f"policy loss {loss.path!r}", algorithm.loss, names=names, needs=needs)
    if chosen.is_own:
        label = f"advantage estimator {chosen.adv_estimator!r}"
        trial.try_estimator(label, algorithm.advantages, names=names, needs=needs)


def _require_what_it_needs(config: RunConfig, kind: type[Algorithm], label: str) -> None:
    missing = [name for name in kind.needs if name not in config.needs]
    if missing:
        raise ConfigError(
            f"{label} needs {', '.join(missing)}, which the run would not have; write algorithm.needs: "
            f"[{', '.join(kind.needs)}]"
        )
    if config.guard.uses(Action.LOWER_CLIP) and kind.loss is not Algorithm.loss and not kind.scalable:
        raise ConfigError(
            f"{label} has a loss of its own and names no clip range, but a guard rule may lower_clip; name "
            "the options that are clip ranges in its `scalable`, or remove guard.*.lower_clip"
        )
    for name in kind.networks:
        if name not in config.frozen_networks:
            line = f"algorithm.networks: {{{name}: FOLDER}}, a model with the policy's tokenizer"
            if name == REFERENCE:
                line = "actor.use_kl_loss: true, with kl_loss_coef: 0 for no KL term beside it"
            raise ConfigError(f"{label} reads the network {name}, which the run does not have; write {line}")


def _log_probs_of(config: RunConfig) -> tuple[str, ...]:
    """Returns the names of the log-probs that an algorithm may read."""
    return ("rollout", "old", *config.frozen_networks)


def _needs_of(config: RunConfig) -> list[str]:
    """Returns what losses and estimators may read besides log-probs."""
    return [*sorted(config.needs), *([] if config.algorithm.teacher is None else ["teacher"])]


def _estimator(config: RunConfig, critic_alone: bool) -> Estimator:
    algorithm = config.algorithm
    if ":" in algorithm.adv_estimator:
        return partial(own.load_estimator(algorithm.adv_estimator), **algorithm.options)
    options = algorithm.estimator_arguments
    if critic_alone and config.critic.warmup_lam is not None:
        # Only the critic's targets are used, which gae makes with lam, vapo with lam_critic.
        options |= {name: config.critic.warmup_lam for name in ("lam", "lam_critic") if name in options}
    return partial(getattr(advantages, algorithm.adv_estimator), **options)


def _policy_loss(config: RunConfig, clip_scale: float) -> LossFunction:
    loss = config.actor.policy_loss
    function = own.load_loss(loss.path) if isinstance(loss, CustomLoss) else getattr(policy_losses, loss.type)
    return partial(function, **_scaled(config.actor.loss_arguments, loss.scalable_options, clip_scale))


def _scaled(options: Mapping[str, Any], scalable: Sequence[str], scale: float) -> dict[str, Any]:
    return {name: value * scale if name in scalable else value for name, value in options.items()}
