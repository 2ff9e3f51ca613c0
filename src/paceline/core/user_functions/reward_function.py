"""The form of a reward function: `f(response: str, ground_truth: str, **extra) -> float | dict[str, float]`.

A function that scores all samples of a prompt together has the form `f(items: list[ScoreItem], **arguments)`
and returns a list with a float or dict per item.
Functions in the forms of verl and TRL are recognised by their parameters' names (`reward_forms`).

This module inspects a function's signature, chooses its keyword arguments and checks its return value, for
calls from child processes and from reward servers.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.core.errors import ConfigError, RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem
from paceline.core.text import encodable, one_line
from paceline.core.user_functions.reward_forms import as_trl_calls, as_verl_calls, is_of_trl, is_of_verl

RESERVED_NAMES = frozenset({"response", "ground_truth", "prompt", "data_source"})
"""Fields of the item that every function is given; no extra column may have one of these names."""

MAX_COMPONENTS = 256
MAX_COMPONENT_CHARS = 256
_VALUE_KEYS = ("score", "reward")
_FORM = "write f(response: str, ground_truth: str, **extra) -> float"
_GROUP_FORM = "write f(items: list[ScoreItem], **arguments) -> list[float]"


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFunction:
    """A reward function whose signature has been inspected.

    `named` are the extra fields that its signature names, `required` are the ones without a default, and
    `takes_any` says whether it accepts others as well (`**extra`).
    """

    reference: str
    call: Callable[..., object]
    named: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    takes_any: bool = False

    @property
    def is_async(self) -> bool:
        """Whether its call must be awaited."""
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(type(self.call).__call__)

    def check_arguments(self, arguments: Mapping[str, object]) -> None:
        """Refuses configured arguments that the function does not name, unless it accepts any.

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
        """The arguments that it names, as a clause for errors."""
        return f"it has {', '.join(sorted(self.named))}" if self.named else "it has none"

    def keywords(self, item: ScoreItem, arguments: Mapping[str, object]) -> dict[str, object]:
        """Returns the keyword arguments of its call for one item.

        `arguments` take precedence over the item's fields.

        Raises:
            RewardError: RAISED when a required field is missing, WRONG_TYPE when a column's name is reserved.
        """
        extra = item.extra
        if not RESERVED_NAMES.isdisjoint(extra):
            taken = ", ".join(sorted(RESERVED_NAMES.intersection(extra)))
            raise RewardError(
                f"extra reward fields may not be named {taken}: rename the columns, a reward function gets "
                "those names already",
                kind=RewardErrorKind.WRONG_TYPE,
            )
        fields: dict[str, object] = {"prompt": item.prompt, "data_source": item.data_source, **extra}
        if not self.takes_any:
            fields = {key: value for key, value in fields.items() if key in self.named}
        fields.update(arguments)
        missing = self.required - fields.keys() if self.required else None
        if missing:
            raise RewardError(
                f"{self.reference} needs {', '.join(sorted(missing))}, which the item does not have: add the "
                "column to data.extra_keys, the argument to kwargs, or a default to the function",
                kind=RewardErrorKind.RAISED,
            )
        return fields


def inspect_function(reference: str, function: object) -> RewardFunction:
    """Checks that an object can be called as a reward function.

    Args:
        reference: its name in errors.

    Raises:
        ConfigError: it cannot be called with a response and a ground truth; the message says how to write it.
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
    except ValueError:  # some functions written in C have none
        return RewardFunction(reference=reference, call=function)
    if is_of_verl(signature.parameters):
        return _of_verl(reference, function, signature.parameters)
    if is_of_trl(signature.parameters):
        raise ConfigError(
            f"reward function {reference!r} has TRL's form, f(prompts, completions, **columns): set group: "
            "true, and it is called with all samples of a prompt"
        )
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ConfigError(
            f"reward function {reference!r} has the signature {signature}: it must take the response and the "
            f"ground truth by position; {_FORM}, or set group: true (paceline reward: "
            "--group) for a function of all samples of a prompt"
        )
    unreachable = [p.name for p in positional[2:] if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if unreachable:
        raise ConfigError(
            f"reward function {reference!r} has the signature {signature}: {', '.join(unreachable)} can only "
            f"be given by position, and only the response and the ground truth are; {_FORM}"
        )
    named = [p for p in positional[2:] if p.kind is not p.POSITIONAL_ONLY]
    named += [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    return _called_by_name(reference, function, parameters, named)


def _called_by_name(
    reference: str,
    function: Callable[..., object],
    parameters: Sequence[inspect.Parameter],
    named: Sequence[inspect.Parameter],
) -> RewardFunction:
    """Returns a function that gets the arguments `named` by name."""
    return RewardFunction(
        reference=reference,
        call=function,
        named=frozenset(p.name for p in named),
        required=frozenset(p.name for p in named if p.default is p.empty),
        takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def _of_verl(
    reference: str, function: Callable[..., object], parameters: Mapping[str, inspect.Parameter]
) -> RewardFunction:
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    named = {
        name: one
        for name, one in parameters.items()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        and name not in ("solution_str", "ground_truth")
    }
    takes_truth = takes_any or "ground_truth" in parameters
    return RewardFunction(
        reference=reference,
        # An async function is not wrapped, so that callers can still tell that it is async.
        call=function if inspect.iscoroutinefunction(function) else as_verl_calls(function, takes_truth),
        named=frozenset(named),
        required=frozenset(name for name, one in named.items() if one.default is one.empty),
        takes_any=takes_any,
    )


def inspect_group_function(reference: str, function: object) -> RewardFunction:
    """Checks that an object can be called with the samples of a prompt.

    Args:
        reference: its name in errors.

    Raises:
        ConfigError: it cannot be called with a list of items alone; the message says how to write it.
    """
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(
            f"reward function {reference!r} is {_kind_of_object(function)}: name a function or an instance; "
            f"{_GROUP_FORM}"
        )
    try:
        signature: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    except ValueError:  # some functions written in C have none
        signature = {}
    if is_of_trl(signature) and not inspect.iscoroutinefunction(function):
        named_alone = frozenset(("completions",))
        return RewardFunction(reference=reference, call=as_trl_calls(function, signature), named=named_alone)
    parameters = list(signature.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p for p in parameters if p.kind is p.KEYWORD_ONLY or p in positional[1:]]
    if parameters and not positional and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ConfigError(
            f"reward function {reference!r} must take the items of a group by position; {_GROUP_FORM}"
        )
    return _called_by_name(reference, function, parameters, named)


def _kind_of_object(function: object) -> str:
    return "a class" if inspect.isclass(function) else f"{type(function).__name__}, not a function"


def check_values(name: str, returned: object, count: int) -> list[object]:
    """Returns what a function returned for several items as a list of one value per item, not yet checked.

    Raises:
        RewardError: WRONG_COUNT for anything else.
    """
    convert = getattr(returned, "tolist", None)  # an array or a tensor, without importing its library
    values = returned if convert is None else convert()
    if isinstance(values, Sequence) and not isinstance(values, str) and len(values) == count:
        return list(values)
    got = f"{len(values)} values" if isinstance(values, Sequence) else type(values).__name__
    raise RewardError(
        f"{name} returned {got} for {count} items: return a list with one value for each",
        kind=RewardErrorKind.WRONG_COUNT,
    )


def check_extra_keys(extra_keys: Sequence[str]) -> None:
    """Refuses data columns with the names of fields that every reward function gets.

    Raises:
        ConfigError: one of `data.extra_keys` has a reserved name.
    """
    taken = RESERVED_NAMES.intersection(extra_keys)
    if taken:
        raise ConfigError(
            f"data.extra_keys names {', '.join(sorted(taken))}, which a reward function is given already: "
            "rename the column"
        )


def check_value(name: str, returned: object) -> tuple[float, dict[str, float]]:
    """Splits a function's return value into its value and its further components (named `name/key`).

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
    """Returns the kind of an exception. TimeoutError and ConnectionError say that another try may help."""
    if isinstance(error, RewardError):
        return error.kind
    if isinstance(error, TimeoutError):
        return RewardErrorKind.TIMEOUT
    if isinstance(error, ConnectionError):
        return RewardErrorKind.UNAVAILABLE
    return RewardErrorKind.RAISED


def describe(name: str, error: BaseException) -> str:
    """Describes an exception that a function raised, on one line."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  an exception whose own __str__ raises
        text = "(its message cannot be shown)"
    return one_line(f"{name} raised {type(error).__name__}{': ' if text else ''}{text}")


def _check_mapping(name: str, returned: Mapping[object, object]) -> tuple[float, dict[str, float]]:
    value_key = next((key for key in _VALUE_KEYS if key in returned), None)
    if value_key is None:
        keys = ", ".join(repr(key) for key in returned) or "nothing"
        raise RewardError(
            one_line(f'{name} returned a dict that holds {keys}: put its value under "score"'),
            kind=RewardErrorKind.WRONG_TYPE,
        )
    if len(returned) > MAX_COMPONENTS:
        raise RewardError(
            f"{name} returned a dict of {len(returned)} values, at most {MAX_COMPONENTS} are kept",
            kind=RewardErrorKind.WRONG_TYPE,
        )
    value = _number(name, returned[value_key])
    components: dict[str, float] = {}
    for key, component in returned.items():
        if key == value_key:
            continue
        label = encodable(f"{name}/{key}")
        if len(label) > MAX_COMPONENT_CHARS:
            raise RewardError(
                f"{name} returned a key of {len(str(key))} characters: shorten it",
                kind=RewardErrorKind.WRONG_TYPE,
            )
        components[label] = _number(label, component)
    return value, components


def _number(label: str, returned: object) -> float:
    # A bool is refused although Python counts it as an integer: it is nearly always a forgotten conversion.
    # numpy's bool is refused, too, because it is not a Real.
    if not isinstance(returned, numbers.Real):
        returned = _only_element(returned)
    if isinstance(returned, bool) or not isinstance(returned, numbers.Real):
        raise RewardError(
            f"{label} returned {type(returned).__name__}: return a float, or a dict of floats",
            kind=RewardErrorKind.WRONG_TYPE,
        )
    try:
        value = float(returned)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise RewardError(f"{label} returned {value}", kind=RewardErrorKind.NOT_FINITE)
    return value


def _only_element(returned: object) -> object:
    """Returns the number in an array or tensor without dimensions, such as a `mean`; else the argument."""
    if getattr(returned, "shape", None) != ():
        return returned
    return returned.item()  # type: ignore[attr-defined]
