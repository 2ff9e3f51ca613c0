"""Loads a user's own loss, estimator or algorithm by its path, and checks it at every call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from paceline.algorithms.algorithm import Algorithm
from paceline.algorithms.policy_losses.base import LossInputs, LossOutputs
from paceline.algorithms.rows import Estimates, SampleRows
from paceline.algorithms.statistics import keep
from paceline.core.errors import ConfigError
from paceline.core.text import one_line
from paceline.core.user_functions.user_function import find_function

RESERVED_METRICS = frozenset(
    {
        "entropy", "first_pg_clipfrac", "first_ppo_kl", "grad_norm", "kl_loss", "loss", "lr", "pg_loss",
        "ppo_kl_max", "skipped_updates",
    }
)  # fmt: skip
"""Names under `actor/` that the update itself reports."""

_LOSS_FORM = "write my_loss(inputs: LossInputs, **options) -> LossOutputs"
_ESTIMATOR_FORM = "write my_estimator(rows: SampleRows, **options) -> Estimates"
_OTHERS = "; algorithm.networks: {NAME: FOLDER} adds a frozen network's"


@functools.cache
def load_loss(path: str) -> Callable[..., LossOutputs]:
    """Returns the policy loss that `path` names; every call checks its result's type, shape and metrics.

    Raises:
        ConfigError: there is no such function.
    """
    label = f"policy loss {path!r}"
    return functools.partial(checked_loss, label, _function(path, label, "policy loss", _LOSS_FORM))


@functools.cache
def load_estimator(path: str) -> Callable[..., Estimates]:
    """Returns the advantage estimator that `path` names; every call checks its result's type and shape.

    Raises:
        ConfigError: there is no such function.
    """
    label = f"advantage estimator {path!r}"
    function = _function(path, label, "advantage estimator", _ESTIMATOR_FORM)
    return functools.partial(checked_estimates, label, function)


@functools.cache
def load_algorithm(path: str) -> type[Algorithm]:
    """Returns the subclass of `Algorithm` that `path` names.

    Raises:
        ConfigError: there is no such class.
    """
    kind = find_function(path, "algorithm")
    if not isinstance(kind, type) or not issubclass(kind, Algorithm):
        raise ConfigError(
            f"algorithm {path!r} is not a subclass of paceline.algorithms.algorithm.Algorithm; write class "
            f"{path.rpartition(':')[2]}(Algorithm) with advantages(self, rows) or loss(self, inputs)"
        )
    return kind


def _function(path: str, label: str, subject: str, form: str) -> Callable[..., object]:
    function = find_function(path, subject)
    if not callable(function):
        raise ConfigError(f"{label} is {type(function).__name__}, not a function: {form}")
    return function


def checked_estimates(
    label: str, estimator: Callable[..., object], rows: SampleRows, **options: Any
) -> Estimates:
    """Returns the estimates of a call, detached and 0 under the mask.

    Raises:
        ConfigError: the call fails, or its result does not fit these rows.
    """
    hint = f"{_ESTIMATOR_FORM} (rows.log_probs has {', '.join(sorted(rows.log_probs))}{_OTHERS})"
    estimates = _called(label, estimator, rows, options, hint)
    if not isinstance(estimates, Estimates):
        raise ConfigError(
            f"{label} returned {type(estimates).__name__}; return Estimates(advantages, returns) of "
            "paceline.algorithms.rows"
        )
    _require_table(label, "advantages", estimates.advantages, rows)
    if (estimates.returns is None) != (rows.values is None):
        raise ConfigError(
            f"{label} returned {'no' if estimates.returns is None else 'some'} returns, and the run has "
            f"{'no' if rows.values is None else 'a'} critic; returns are the critic's targets: return them "
            "if and only if rows.values is not None"
        )
    if estimates.returns is not None:
        _require_table(label, "returns", estimates.returns, rows)
        return Estimates(keep(estimates.advantages.detach(), rows.mask), estimates.returns.detach())
    return Estimates(keep(estimates.advantages.detach(), rows.mask))


def _called(
    label: str,
    function: Callable[..., object],
    argument: SampleRows | LossInputs,
    options: Mapping[str, Any],
    hint: str,
) -> object:
    """Calls the user's function; turns its errors into a ConfigError that ends in `hint`."""
    try:
        return function(argument, **options)
    except Exception as error:
        raise ConfigError(
            f"{one_line(f'{label}: its call raised {type(error).__name__}: {error}')}; {hint}"
        ) from error


def _require_table(label: str, name: str, table: object, rows: SampleRows) -> None:
    shape = tuple(rows.mask.shape)
    if not isinstance(table, Tensor) or tuple(table.shape) != shape or not table.is_floating_point():
        got = f"{tuple(table.shape)} {table.dtype}" if isinstance(table, Tensor) else type(table).__name__
        raise ConfigError(
            f"{label} returned {name} of {got}; return one number per token, of the shape of rows.mask, "
            f"here {shape}"
        )


def checked_loss(
    label: str, user_function: Callable[..., object], inputs: LossInputs, **options: Any
) -> LossOutputs:
    """Returns the outputs of a call, without waiting for the device.

    Raises:
        ConfigError: the call fails, or its result cannot be used as a loss.
    """
    hint = f"{_LOSS_FORM} (inputs.log_probs_of has {', '.join(sorted(inputs.log_probs_of))}{_OTHERS})"
    hint += "" if "reference" in inputs.log_probs_of else _NO_REFERENCE
    outputs = _called(label, user_function, inputs, options, hint)
    if not isinstance(outputs, LossOutputs):
        raise ConfigError(
            f"{label} returned {type(outputs).__name__}; return LossOutputs(loss, metrics) of "
            "paceline.algorithms.policy_losses"
        )
    loss = outputs.loss
    if not isinstance(loss, Tensor) or loss.shape != inputs.mask.shape or not loss.is_floating_point():
        got = f"{tuple(loss.shape)} {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(
            f"{label} returned a loss of {got}; return one number per token, of the shape of "
            f"inputs.log_probs, here {tuple(inputs.mask.shape)}, and leave the reduction to "
            "actor.loss_agg_mode"
        )
    metrics = {name: _metric(label, name, value, loss) for name, value in outputs.metrics.items()}
    return LossOutputs(loss, metrics)


_NO_REFERENCE = (
    " (inputs.ref_log_probs is None; a loss that reads it needs actor.use_kl_loss=true, with "
    "kl_loss_coef=0 if no KL term is wanted)"
)


def _metric(label: str, name: object, value: object, loss: Tensor) -> Tensor:
    if not isinstance(name, str) or not name or name in RESERVED_METRICS:
        raise ConfigError(
            f"{label} reports a metric named {name!r}; choose another name than "
            f"{', '.join(sorted(RESERVED_METRICS))}, which the update reports itself"
        )
    if isinstance(value, (int, float)):
        return loss.new_tensor(float(value), requires_grad=False)
    if not isinstance(value, Tensor) or value.dim() != 0:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(
            f"{label} reports {name!r} as {got}; report one number, the mean over the "
            "unmasked tokens (statistics.masked_mean)"
        )
    return value.detach()
