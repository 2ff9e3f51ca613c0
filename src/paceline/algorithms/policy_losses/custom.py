"""A policy loss of the user's own: found by its path, tried on a few tokens, and checked at every call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.algorithms.policy_losses.base import LossFunction, LossInputs, LossOutputs
from paceline.core.errors import ConfigError
from paceline.core.text import one_line
from paceline.core.user_function import find_function

RESERVED_METRICS = frozenset(
    {
        "entropy", "first_pg_clipfrac", "first_ppo_kl", "grad_norm", "kl_loss", "loss", "lr", "pg_loss",
        "ppo_kl_max", "skipped_updates",
    }
)  # fmt: skip
"""Names under `actor/` that the update itself reports."""

_FORM = "write my_loss(inputs: LossInputs, **options) -> LossOutputs"


def load(path: str, options: Mapping[str, Any], *, with_reference: bool) -> LossFunction:
    """The loss that `path` names, after a call on a few tokens, which also tells the names of its metrics.

    The returned function checks each result's type, shape and names of metrics, without a wait for the
    device.

    Args:
        path: `path/to/file.py:function` or `module:function`.
        options: keyword arguments of every call.
        with_reference: whether `ref_log_probs` will be there.

    Raises:
        ConfigError: there is no such function, the call fails, or its result is no loss to train with.
    """
    return _load(path, tuple(sorted(options.items())), with_reference)


@functools.cache
def _load(path: str, options: tuple[tuple[str, Any], ...], with_reference: bool) -> LossFunction:
    user_function = find_function(path, "policy loss")
    if not callable(user_function):
        raise ConfigError(f"policy loss {path!r} is {type(user_function).__name__}, not a function: {_FORM}")
    checked = functools.partial(_call, path, user_function)
    return LossFunction(function=checked, metrics=_try_out(path, checked, dict(options), with_reference))


def _call(path: str, user_function: Callable[..., object], inputs: LossInputs, **options: Any) -> LossOutputs:
    try:
        outputs = user_function(inputs, **options)
    except Exception as error:
        raise ConfigError(
            one_line(f"policy loss {path!r}: its call raised {type(error).__name__}: {error}; {_FORM}")
            + ("" if inputs.ref_log_probs is not None else _NO_REFERENCE)
        ) from error
    if not isinstance(outputs, LossOutputs):
        raise ConfigError(
            f"policy loss {path!r} returned {type(outputs).__name__}; return LossOutputs(loss, metrics) of "
            "paceline.algorithms.policy_losses"
        )
    loss = outputs.loss
    if not isinstance(loss, Tensor) or loss.shape != inputs.mask.shape or not loss.is_floating_point():
        got = f"{tuple(loss.shape)} {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(
            f"policy loss {path!r} returned a loss of {got}; return one number per token, of the shape of "
            f"inputs.log_probs, here {tuple(inputs.mask.shape)}, and leave the reduction to "
            "actor.loss_agg_mode"
        )
    metrics = {name: _metric(path, name, value, loss) for name, value in outputs.metrics.items()}
    return LossOutputs(loss, metrics)


_NO_REFERENCE = (
    " (inputs.ref_log_probs is None; a loss that reads it needs actor.use_kl_loss=true, with "
    "kl_loss_coef=0 for no KL term beside it)"
)


def _metric(path: str, name: object, value: object, loss: Tensor) -> Tensor:
    if not isinstance(name, str) or not name or name in RESERVED_METRICS:
        raise ConfigError(
            f"policy loss {path!r} reports a metric named {name!r}; choose another name than "
            f"{', '.join(sorted(RESERVED_METRICS))}, which the update reports itself"
        )
    if isinstance(value, (int, float)):
        return loss.new_tensor(float(value), requires_grad=False)
    if not isinstance(value, Tensor) or value.dim() != 0:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(
            f"policy loss {path!r} reports {name!r} as {got}; report one number, the mean over the "
            "unmasked tokens (statistics.masked_mean)"
        )
    return value.detach()


def _try_out(
    path: str, loss: Callable[..., LossOutputs], options: Mapping[str, Any], with_reference: bool
) -> tuple[str, ...]:
    """Calls the loss on two short sequences with padding; returns the names of its metrics."""
    log_probs = torch.tensor([[-1.0, -0.5, 0.0], [-2.0, 0.0, 0.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    old_log_probs = torch.tensor([[-1.1, -0.5, 0.0], [-1.8, 0.0, 0.0]])
    inputs = LossInputs(
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        advantages=torch.tensor([[1.0, 1.0, 0.0], [-0.5, 0.0, 0.0]]),
        mask=mask,
        rollout_log_probs=old_log_probs.clone(),
        ref_log_probs=old_log_probs - 0.1 if with_reference else None,
        scores=torch.tensor([1.0, 0.0]),
    )
    per_token, metrics = loss(inputs, **options)
    kept = torch.where(mask, per_token, 0.0)
    if not kept.requires_grad:
        raise ConfigError(
            f"policy loss {path!r} does not depend on inputs.log_probs: nothing would be learned; compute "
            "it from them, without detach()"
        )
    (gradient,) = torch.autograd.grad(kept.sum(), log_probs)
    for name, numbers in {"its loss": kept, "its gradient": gradient, **metrics}.items():
        if not bool(torch.isfinite(numbers).all()):
            raise ConfigError(
                f"policy loss {path!r}: {name} is not finite on two sequences with log-ratios within 0.2; "
                "look for a division by 0 or a logarithm of 0, under the mask too (torch.where(mask, x, "
                "0.0) before it)"
            )
    return tuple(metrics)
