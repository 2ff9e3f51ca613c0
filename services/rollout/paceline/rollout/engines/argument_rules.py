"""Which values `rollout.engine_kwargs` may have; the reasons that several engines have for a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError

Refusals = Mapping[str, str]
"""Argument -> why it is refused"""

Allowed = Mapping[str, tuple[tuple[object, ...], str]]
"""Argument -> the values that it may have, and why no others"""

ADAPTERS: Final = "adapters are not pushed: the sampled policy would not be the trained one"
DRAFTS: Final = "a draft model is not pushed, and samples would depend on its proposals"
GENERATES: Final = "a rollout server generates"
MOVED: Final = "parameters would not stay where a push writes them"
MOVED_EXPERTS: Final = "experts would move between ranks, away from where a push loads them"
NOT_REPRODUCIBLE: Final = "the same request would not give the same sample again"
OTHER_MODEL: Final = "the engine would run another model than the learner trains"
OTHER_POLICY: Final = (
    "samples would be drawn from another distribution than the one that the learner computes"
)
OTHER_WEIGHTS: Final = "weights come only over Paceline's own weight group"
QUANTIZED: Final = "weights are pushed as they are trained, into parameters that are not quantized"
RANKS: Final = "a server's ranks are its tensor-parallel ranks; write rollout.replicas for more servers"
STALE_KEYS: Final = "keys and values of older weights would outlive the reset of the prefix cache"


def refuse(config: RunConfig, own: Refusals, refused: Refusals, allowed: Allowed) -> None:
    """Checks the arguments of an engine that `rollout.engine_kwargs` sets.

    Args:
        own: arguments that Paceline sets itself.
        refused: arguments that are refused, unless their value is false, empty or 0.
        allowed: arguments with a choice of values.

    Raises:
        ConfigError: some may not be set; the message names each argument, its value and the reason.
    """
    kwargs, reasons = config.rollout.engine_kwargs, dict[str, str]()
    for name, value in kwargs.items():
        if name in own:
            reasons[name] = own[name]
        elif name in allowed and value not in allowed[name][0]:
            values, reason = allowed[name]
            reasons[name] = f"{reason} (allowed: {', '.join(map(str, values))})"
        elif name not in allowed and name in refused and value:
            reasons[name] = refused[name]
    lines = [f"{name}={kwargs[name]!r}: {reason}" for name, reason in sorted(reasons.items())]
    if lines:
        raise ConfigError(f"rollout.engine_kwargs may not set {'; '.join(lines)}. Remove it")
