"""A reward function as configured, and the weighted sum of several functions' values for an item."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.errors import RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem
from paceline.core.user_functions.reward_function import check_value
from paceline.reward.scoring.shape import Shape

SENT_FIELDS = (
    "trajectory_id",
    "prompt",
    "response",
    "ground_truth",
    "data_source",
    "extra",
    "group",
    "val_set",
)
"""The fields of an item that a reward process gets, in their order in a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionSpec:
    """One reward function as configured.

    Args:
        name: name of the function's component, unique in a configuration.
        reference: a built-in's name, `module:function` or `path/to/file.py:function`.
        shape: how the function's value enters the sum that is the reward.
        arguments: keyword arguments of every call, for example `{"method": "flexible"}`.
    """

    name: str
    reference: str
    shape: Shape = field(default_factory=Shape)
    arguments: Mapping[str, object] = field(default_factory=dict)


def combine(
    functions: Sequence[FunctionSpec], returned: Sequence[object], item: ScoreItem
) -> tuple[float, dict[str, float]]:
    """Returns the weighted sum over the functions, and all components.

    Raises:
        RewardError: a returned value is refused (see `check_value`), or the weighted sum overflows.
    """
    reward = 0.0
    components: dict[str, float] = {}
    for spec, returned_value in zip(functions, returned, strict=True):
        value, further = check_value(spec.name, returned_value)
        components[spec.name] = value
        components.update(further)
        reward += spec.shape.contribution(value, item)
    if not math.isfinite(reward):
        raise RewardError(
            f"the weighted sum of {', '.join(spec.name for spec in functions)} is {reward}",
            kind=RewardErrorKind.NOT_FINITE,
        )
    return reward, components
