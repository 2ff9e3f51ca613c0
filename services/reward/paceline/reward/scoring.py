"""What is scored and what comes of it: items, function specifications, results, and how components combine."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.errors import ConfigError, InvalidMessageError, RewardError, RewardErrorKind

RETRIED_KINDS = frozenset({RewardErrorKind.TIMEOUT, RewardErrorKind.CRASHED, RewardErrorKind.UNAVAILABLE})
"""The errors that another attempt may cure; any other kind would only come again."""

RESERVED_NAMES = frozenset({"response", "ground_truth", "prompt", "data_source"})
MAX_MESSAGE_CHARS = 500
_VALUE_KEYS = ("score", "reward")


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardItem:
    """One response to be scored.

    `extra` holds the data row's other columns and reaches the functions as keyword arguments, beside `prompt` and
    `data_source`.

    Raises:
        InvalidMessageError: a key of `extra` is one that the item itself has.
    """

    trajectory_id: str
    response: str
    ground_truth: str
    prompt: str = ""
    data_source: str = ""
    extra: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        taken = RESERVED_NAMES.intersection(self.extra)
        if taken:
            raise InvalidMessageError(
                f"{self.trajectory_id}: extra reward fields may not be named {', '.join(sorted(taken))}: rename the "
                "columns, a reward function gets those names already",
                reason="reserved_extra_name",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionSpec:
    """One reward function as configured.

    Args:
        name: its name among the components, unique in a configuration.
        reference: a built-in's name, `module:function` or `path/to/file.py:function`.
        weight: what its value is multiplied with in the sum that is the reward.
        arguments: keyword arguments given at every call, say `{"method": "flexible"}`.
        minimum, maximum: the range that its value must lie in; None leaves that side open.
    """

    name: str
    reference: str
    weight: float = 1.0
    arguments: Mapping[str, object] = field(default_factory=dict)
    minimum: float | None = None
    maximum: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreResult:
    """What came of one item: a finite `reward`, or None and the `error` that says why.

    `components` holds each function's value under its name, and further values of a function that returned a dict
    under `name/key`. `seconds` is the time spent in the functions at the last attempt.
    """

    trajectory_id: str
    reward: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    error: tuple[RewardErrorKind, str] | None = None
    seconds: float = 0.0


def failed(trajectory_id: str, kind: RewardErrorKind, message: str, seconds: float = 0.0) -> ScoreResult:
    """The result of an item that could not be scored."""
    return ScoreResult(
        trajectory_id=trajectory_id, reward=None, error=(kind, one_line(message)), seconds=seconds
    )


def check_specs(functions: Sequence[FunctionSpec]) -> None:
    """Refuses a list of functions whose combination would make no sense.

    Raises:
        ConfigError: it is empty, a name comes twice or holds a slash, a weight is not finite, or a range is empty.
    """
    if not functions:
        raise ConfigError("reward.functions is empty: name at least one function, say exact_match")
    seen: set[str] = set()
    for spec in functions:
        if not spec.name or "/" in spec.name:
            raise ConfigError(
                f"reward.functions: the name {spec.name!r} must be non-empty and hold no slash, which separates a "
                "function's name from a key of the dict that it returns"
            )
        if spec.name in seen:
            raise ConfigError(
                f"reward.functions: two functions are named {spec.name!r}: give one another name"
            )
        seen.add(spec.name)
        if not math.isfinite(spec.weight):
            raise ConfigError(
                f"reward.functions: the weight of {spec.name!r} is {spec.weight}: write a finite number"
            )
        if spec.minimum is not None and spec.maximum is not None and spec.minimum > spec.maximum:
            raise ConfigError(
                f"reward.functions: {spec.name!r} allows values from {spec.minimum:g} to {spec.maximum:g}, which are "
                "none: minimum must not exceed maximum"
            )


def check_value(spec: FunctionSpec, returned: object) -> tuple[float, dict[str, float]]:
    """A function's return value as its value and its further components (named `spec.name/key`).

    Raises:
        RewardError: WRONG_TYPE for anything but a number or a dict of numbers with "score" (or "reward");
            NOT_FINITE for NaN and infinities; OUT_OF_RANGE for a value outside the configured range.
    """
    components: dict[str, float] = {}
    if type(returned) is float:  # what nearly every function returns
        value = returned
        if not math.isfinite(value):
            raise RewardError(f"{spec.name} returned {value}", kind=RewardErrorKind.NOT_FINITE)
    elif isinstance(returned, Mapping):
        value, components = _check_mapping(spec, returned)
    else:
        value = _number(spec.name, returned)
    if (spec.minimum is not None and value < spec.minimum) or (
        spec.maximum is not None and value > spec.maximum
    ):
        low = "-inf" if spec.minimum is None else f"{spec.minimum:g}"
        high = "inf" if spec.maximum is None else f"{spec.maximum:g}"
        raise RewardError(
            f"{spec.name} returned {value:g}, outside its range [{low}, {high}]",
            kind=RewardErrorKind.OUT_OF_RANGE,
        )
    return value, components


def combine(functions: Sequence[FunctionSpec], returned: Sequence[object]) -> tuple[float, dict[str, float]]:
    """The reward, which is the sum of weight times value over the functions, and all components.

    Args:
        functions: the functions, in order.
        returned: what each of them returned.

    Raises:
        RewardError: a return value is refused (see `check_value`), or their weighted sum overflows.
    """
    reward = 0.0
    components: dict[str, float] = {}
    for spec, one in zip(functions, returned, strict=True):
        value, further = check_value(spec, one)
        components[spec.name] = value
        components.update(further)
        reward += spec.weight * value
    if not math.isfinite(reward):
        raise RewardError(
            f"the weighted sum of {', '.join(spec.name for spec in functions)} is {reward}",
            kind=RewardErrorKind.NOT_FINITE,
        )
    return reward, components


def one_line(text: str) -> str:
    """The text on one line, its end cut off where it is very long."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_MESSAGE_CHARS else f"{line[: MAX_MESSAGE_CHARS - 3]}..."


def _check_mapping(spec: FunctionSpec, returned: Mapping[object, object]) -> tuple[float, dict[str, float]]:
    key = next((name for name in _VALUE_KEYS if name in returned), None)
    if key is None:
        found = ", ".join(repr(name) for name in returned) or "nothing"
        raise RewardError(
            f'{spec.name} returned a dict that holds {found}: put its value under "score"',
            kind=RewardErrorKind.WRONG_TYPE,
        )
    value = _number(spec.name, returned[key])
    components: dict[str, float] = {}
    for name, one in returned.items():
        if name != key:
            label = f"{spec.name}/{name}"
            components[label] = _number(label, one)
    return value, components


def _number(label: str, given: object) -> float:
    # A bool is refused although Python counts it among the integers: it is nearly always a forgotten conversion,
    # and the same goes for what numpy calls a bool, which is no Real anyway.
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise RewardError(
            f"{label} returned {type(given).__name__}: return a float, or a dict of floats",
            kind=RewardErrorKind.WRONG_TYPE,
        )
    try:
        value = float(given)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise RewardError(f"{label} returned {value}", kind=RewardErrorKind.NOT_FINITE)
    return value
