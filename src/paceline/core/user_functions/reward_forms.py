"""Reward functions in the forms of verl and TRL, called as those programs call them.

verl: `f(data_source, solution_str, ground_truth, extra_info=None)` for one response, by keyword.
TRL: `f(prompts, completions, **columns) -> list[float | None]` for several responses, here the samples of a
prompt.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.core.errors import RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem

_VERL, _TRL = "solution_str", "completions"
_NOT_KEPT = ("completion_ids", "trainer_state", "environments")


def is_of_verl(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Returns whether a function has verl's form: it names `solution_str`."""
    return _VERL in parameters


def is_of_trl(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Returns whether a function has TRL's form: it names `completions`."""
    return _TRL in parameters


def as_verl_calls(function: Callable[..., object], takes_truth: bool) -> Callable[..., object]:
    """Adapts a function of verl's form to ours: `f(response, ground_truth, **extra)`.

    Of a returned dict, the numbers and truth values are kept; of a sequence, the first value.
    """

    def call(response: str, ground_truth: str, **extra: object) -> object:
        truth = {"ground_truth": ground_truth} if takes_truth else {}
        return _plain(function(**{_VERL: response}, **truth, **extra))

    return call


def _plain(returned: object) -> object:
    if isinstance(returned, Mapping):
        return {
            key: float(value) for key, value in returned.items() if isinstance(value, numbers.Real | bool)
        }
    if isinstance(returned, Sequence) and not isinstance(returned, str) and returned:
        return _plain(returned[0])
    return float(returned) if isinstance(returned, bool) else returned


def as_trl_calls(
    function: Callable[..., object], parameters: Mapping[str, inspect.Parameter]
) -> Callable[..., object]:
    """Adapts a function of TRL's form to the samples of a prompt: `f(items, completions="text")`.

    It gets the rows' columns and the ground truths as lists. A returned None counts as 0, because TRL's sum
    leaves it out.
    """
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = {
        name for name, one in parameters.items() if one.default is one.empty and one.kind not in variadic
    }
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())

    def call(items: list[ScoreItem], completions: str = "text") -> object:
        given = _columns(items, completions)
        if lacking := sorted(needed - given.keys()):
            raise RewardError(
                f"it needs the column {lacking[0]}, which the row does not have: add it to data.extra_keys",
                kind=RewardErrorKind.RAISED,
            )
        if not takes_any:
            given = {name: value for name, value in given.items() if name in parameters}
        returned = function(**given)
        if isinstance(returned, list | tuple):
            return [0.0 if value is None else value for value in returned]
        return returned

    return call


def _columns(items: Sequence[ScoreItem], completions: str) -> dict[str, Any]:
    """Returns the arguments that TRL passes; `completions` is "messages" for conversational prompts."""
    if completions not in ("text", "messages"):
        raise ValueError(f"completions={completions!r} must be text or messages")
    as_messages = completions == "messages"
    columns: dict[str, Any] = {
        name: [item.extra.get(name) for item in items] for name in items[0].extra if name not in _NOT_KEPT
    }
    return columns | {
        "prompts": [_message("user", item.prompt) if as_messages else item.prompt for item in items],
        _TRL: [_message("assistant", item.response) if as_messages else item.response for item in items],
        "ground_truth": [item.ground_truth for item in items],
        "data_source": [item.data_source for item in items],
        "log_extra": _ignore,
        "log_metric": _ignore,
        **dict.fromkeys(_NOT_KEPT),
    }


def _message(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def _ignore(*_: object, **__: object) -> None:
    """Stands in for TRL's loggers: a run records rewards and their components by itself."""
