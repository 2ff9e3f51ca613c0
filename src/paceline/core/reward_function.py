"""The public form of a reward function: `f(response: str, ground_truth: str, **extra) -> float | dict[str, float]`.

Where it is called from (a scoring worker, a reward server) does not matter: how it is looked over, what it is given and what it
may return is settled here.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.core.errors import ConfigError, RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem

RESERVED_NAMES = frozenset({"response", "ground_truth", "prompt", "data_source"})
"""What a function is given of the item itself; a further column cannot have one of these names."""

MAX_COMPONENTS = 256
MAX_COMPONENT_CHARS = 256
MAX_MESSAGE_CHARS = 500
_VALUE_KEYS = ("score", "reward")
_FORM = "write f(response: str, ground_truth: str, **extra) -> float"


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFunction:
    """A reward function that was looked over.

    `named` are the extra fields that its signature names, `required` those of them without a default, and
    `takes_any` tells whether it takes others too (`**extra`).
    """

    reference: str
    call: Callable[..., object]
    named: frozenset[str]
    required: frozenset[str]
    takes_any: bool

    @property
    def is_async(self) -> bool:
        """Whether its call must be awaited."""
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(type(self.call).__call__)

    def check_arguments(self, arguments: Mapping[str, object]) -> None:
        """Refuses configured arguments that the function does not name, unless it takes any.

        Raises:
            ConfigError: an argument is unknown.
        """
        unknown = sorted(set(arguments) - self.named)
        if unknown and not self.takes_any:
            raise ConfigError(
                f"reward function {self.reference!r} has no argument {unknown[0]!r}; {self.known}"
            )

    @property
    def known(self) -> str:
        """What it could be given, in words."""
        return f"it has {', '.join(sorted(self.named))}" if self.named else "it has none"

    def keywords(self, item: ScoreItem, arguments: Mapping[str, object]) -> dict[str, object]:
        """The keyword arguments of its call for one item.

        `arguments` win over the item's fields.

        Raises:
            RewardError: RAISED where a required field is missing, WRONG_TYPE where a column has a reserved name.
        """
        extra = item.extra
        if not RESERVED_NAMES.isdisjoint(extra):
            taken = ", ".join(sorted(RESERVED_NAMES.intersection(extra)))
            raise RewardError(
                f"extra reward fields may not be named {taken}: rename the columns, a reward function gets those names "
                "already",
                kind=RewardErrorKind.WRONG_TYPE,
            )
        fields: dict[str, object] = {"prompt": item.prompt, "data_source": item.data_source, **extra}
        if not self.takes_any:
            fields = {key: value for key, value in fields.items() if key in self.named}
        fields.update(arguments)
        missing = self.required - fields.keys() if self.required else None
        if missing:
            raise RewardError(
                f"{self.reference} needs {', '.join(sorted(missing))}, which the item does not have: add the column to "
                "data.extra_keys, the argument to kwargs, or a default to the function",
                kind=RewardErrorKind.RAISED,
            )
        return fields


def look_over(reference: str, function: object) -> RewardFunction:
    """Checks that an object can be called as a reward function.

    Args:
        reference: what to call it in errors.
        function: the object.

    Raises:
        ConfigError: it cannot be called with a response and a ground truth; says how to write it.
    """
    if not callable(function):
        raise ConfigError(
            f"reward function {reference!r} is {type(function).__name__}, not a function: {_FORM}"
        )
    if inspect.isclass(function):
        raise ConfigError(
            f"reward function {reference!r} is a class: name a function or an instance; {_FORM}"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C do not tell theirs
        return RewardFunction(
            reference=reference, call=function, named=frozenset(), required=frozenset(), takes_any=False
        )
    parameters = list(signature.parameters.values())
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2 and not any(one.kind is one.VAR_POSITIONAL for one in parameters):
        raise ConfigError(
            f"reward function {reference!r} has the signature {signature}: it must take the response and the ground "
            f"truth by position; {_FORM}"
        )
    stuck = [
        one.name for one in positional[2:] if one.kind is one.POSITIONAL_ONLY and one.default is one.empty
    ]
    if stuck:
        raise ConfigError(
            f"reward function {reference!r} has the signature {signature}: {', '.join(stuck)} can only be given by "
            f"position, and only the response and the ground truth are; {_FORM}"
        )
    named = [one for one in positional[2:] if one.kind is not one.POSITIONAL_ONLY]
    named += [one for one in parameters if one.kind is one.KEYWORD_ONLY]
    return RewardFunction(
        reference=reference,
        call=function,
        named=frozenset(one.name for one in named),
        required=frozenset(one.name for one in named if one.default is one.empty),
        takes_any=any(one.kind is one.VAR_KEYWORD for one in parameters),
    )


def check_value(name: str, returned: object) -> tuple[float, dict[str, float]]:
    """A function's return value as its value and its further components (named `name/key`).

    Raises:
        RewardError: WRONG_TYPE for anything but a number or a dict of numbers with "score" (or "reward");
            NOT_FINITE for NaN and infinities.
    """
    if type(returned) is float and math.isfinite(returned):  # what nearly every function returns
        return returned, {}
    if isinstance(returned, Mapping):
        return _check_mapping(name, returned)
    return _number(name, returned), {}


def kind_of(error: BaseException) -> RewardErrorKind:
    """The kind of what a function raised; by the standard exceptions it may say that another attempt could help."""
    if isinstance(error, RewardError):
        return error.kind
    if isinstance(error, TimeoutError):
        return RewardErrorKind.TIMEOUT
    if isinstance(error, ConnectionError):
        return RewardErrorKind.UNAVAILABLE
    return RewardErrorKind.RAISED


def describe(name: str, error: BaseException) -> str:
    """What a function raised, on one line."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  an exception whose own __str__ raises
        text = "(its message cannot be shown)"
    return one_line(f"{name} raised {type(error).__name__}{': ' if text else ''}{text}")


def one_line(text: str) -> str:
    """The text on one line, its end cut off where it is very long."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_MESSAGE_CHARS else f"{line[: MAX_MESSAGE_CHARS - 3]}..."


def _check_mapping(name: str, returned: Mapping[object, object]) -> tuple[float, dict[str, float]]:
    key = next((one for one in _VALUE_KEYS if one in returned), None)
    if key is None:
        found = ", ".join(repr(one) for one in returned) or "nothing"
        raise RewardError(
            one_line(f'{name} returned a dict that holds {found}: put its value under "score"'),
            kind=RewardErrorKind.WRONG_TYPE,
        )
    if len(returned) > MAX_COMPONENTS:
        raise RewardError(
            f"{name} returned a dict of {len(returned)} values, at most {MAX_COMPONENTS} are kept",
            kind=RewardErrorKind.WRONG_TYPE,
        )
    value = _number(name, returned[key])
    components: dict[str, float] = {}
    for one, given in returned.items():
        if one == key:
            continue
        label = f"{name}/{one}"
        if len(label) > MAX_COMPONENT_CHARS:
            raise RewardError(
                f"{name} returned a key of {len(str(one))} characters: shorten it",
                kind=RewardErrorKind.WRONG_TYPE,
            )
        components[label] = _number(label, given)
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
