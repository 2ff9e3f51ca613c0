"""A Python function as a tool: its description for the model, and the check of a call's arguments."""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.samples.chat import ToolSpec
from paceline.core.text import encodable

_FORM = "write a function with named, annotated parameters and a docstring that says what it does"
_TYPES: Mapping[object, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}


def describe_tool(reference: str, function: object) -> ToolSpec:
    """Describes a function as a tool: its name, its docstring, its parameters by their annotations.

    Raises:
        ConfigError: it is not a function, has no docstring, or has a parameter that cannot be given by name.
    """
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"tool {reference!r} is {type(function).__name__}, not a function: {_FORM}")
    name = getattr(function, "__name__", reference.rpartition(":")[2])
    text = inspect.getdoc(function)
    if not text:
        raise ConfigError(f"tool {reference!r} has no docstring to describe it to the model: {_FORM}")
    properties, required = {}, []
    hints = _hints(function)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"tool {reference!r} has the parameter {parameter}: a model gives arguments by name; {_FORM}"
            )
        properties[parameter.name] = _schema(hints.get(parameter.name))
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return ToolSpec(name=name, description=text.strip(), parameters=parameters)


def argument_problem(spec: ToolSpec, arguments: Mapping[str, object]) -> str:
    """Says why a call cannot be made with these arguments, for the model to read; "" if it can."""
    known: Any = spec.parameters.get("properties", {})
    needed: Any = spec.parameters.get("required", [])
    has = f"it has {', '.join(known) or 'none'}"
    unknown = [name for name in arguments if name not in known]
    if unknown:
        return f"{spec.name} has no argument {unknown[0]!r}; {has}"
    missing = [name for name in needed if name not in arguments]
    return f"{spec.name} needs the argument {missing[0]!r}; {has}" if missing else ""


def result_text(returned: object) -> str:
    """Writes what a tool returned as text: a string unchanged, other values as JSON if possible."""
    if isinstance(returned, str):
        return encodable(returned)
    if returned is None:
        return ""
    try:
        return json.dumps(returned, ensure_ascii=False)
    except (TypeError, ValueError):
        return encodable(str(returned))


def _hints(function: Callable[..., object]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception:  # noqa: BLE001  annotations may be any expression of the user's
        return {}


def _schema(hint: object) -> dict[str, object]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        plain = [argument for argument in arguments if argument is not type(None)]
        return _schema(plain[0]) if len(plain) == 1 else {}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is list and arguments:
        return {"type": "array", "items": _schema(arguments[0])}
    name = _TYPES.get(origin or hint)
    return {"type": name} if name else {}
