"""What comes of scoring: the functions as configured, verdicts, and how the parts of a reward combine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.errors import ConfigError, RewardError, RewardErrorKind
from paceline.core.reward_function import check_value, one_line

RETRIED_KINDS = frozenset({RewardErrorKind.TIMEOUT, RewardErrorKind.CRASHED, RewardErrorKind.UNAVAILABLE})
"""The errors that another attempt may cure; any other kind would only come again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionSpec:
    """One reward function as configured.

    Args:
        name: its name among the components, unique in a configuration.
        reference: a built-in's name, `module:function` or `path/to/file.py:function`.
        weight: what its value is multiplied with in the sum that is the reward.
        arguments: keyword arguments given at every call, say `{"method": "flexible"}`.
    """

    name: str
    reference: str
    weight: float = 1.0
    arguments: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What came of one item: a finite `reward`, or None and the `error` that says why.

    `components` holds each scorer's value under its name, and further values of one that returned a dict under
    `name/key`. `seconds` is the time spent in the scorers at the last attempt.
    """

    trajectory_id: str
    reward: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    error: tuple[RewardErrorKind, str] | None = None
    seconds: float = 0.0


def failed(trajectory_id: str, kind: RewardErrorKind, message: str, seconds: float = 0.0) -> Verdict:
    """The verdict on an item that could not be scored."""
    return Verdict(trajectory_id=trajectory_id, reward=None, error=(kind, one_line(message)), seconds=seconds)


def check_names(names: Sequence[str]) -> None:
    """Refuses names of scorers that would make components ambiguous.

    Raises:
        ConfigError: a name is empty, comes twice or holds a slash.
    """
    seen: set[str] = set()
    for name in names:
        if not name or "/" in name:
            raise ConfigError(
                f"reward: the name {name!r} must be non-empty and hold no slash, which separates a scorer's name from a "
                "key of the dict that it returns"
            )
        if name in seen:
            raise ConfigError(f"reward: two scorers are named {name!r}: give one another name")
        seen.add(name)


def combine(functions: Sequence[FunctionSpec], returned: Sequence[object]) -> tuple[float, dict[str, float]]:
    """The weighted sum over the functions, and all components.

    Args:
        functions: the functions, in order.
        returned: what each of them returned.

    Raises:
        RewardError: a return value is refused (see `check_value`), or the weighted sum overflows.
    """
    reward = 0.0
    components: dict[str, float] = {}
    for spec, one in zip(functions, returned, strict=True):
        value, further = check_value(spec.name, one)
        components[spec.name] = value
        components.update(further)
        reward += spec.weight * value
    if not math.isfinite(reward):
        raise RewardError(
            f"the weighted sum of {', '.join(spec.name for spec in functions)} is {reward}",
            kind=RewardErrorKind.NOT_FINITE,
        )
    return reward, components


def add(parts: Sequence[Verdict], *, minimum: float, maximum: float) -> Verdict:
    """One verdict from those of several scorers on the same item: the sum of their rewards, or their first error.

    Args:
        parts: at least one verdict, weights already applied.
        minimum, maximum: the range that the sum must lie in; outside, the verdict is OUT_OF_RANGE.
    """
    trajectory_id = parts[0].trajectory_id
    seconds = max(part.seconds for part in parts)  # the scorers work at the same time
    components = {name: value for part in parts for name, value in part.components.items()}
    reward = 0.0
    for part in parts:
        if part.reward is None:
            return Verdict(trajectory_id=trajectory_id, reward=None, error=part.error, seconds=seconds)
        reward += part.reward
    if not minimum <= reward <= maximum:
        message = f"the reward {reward:g} lies outside [reward.min_reward, reward.max_reward] = [{minimum:g}, {maximum:g}]"
        return failed(trajectory_id, RewardErrorKind.OUT_OF_RANGE, message, seconds)
    return Verdict(trajectory_id=trajectory_id, reward=reward, components=components, seconds=seconds)
