"""Reads the tool calls in the policy's answers. An unreadable call becomes a call with a problem."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.samples.chat import Message, ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAGGED = re.compile(re.escape(_OPEN) + r"(.*?)(?:" + re.escape(_CLOSE) + r"|(?=<tool_call>)|\Z)", re.DOTALL)
_MAX_CALLS = 64


def read_action(text: str, call_format: str, turn: int) -> Message:
    """Returns the policy's message: its text, and the calls in it."""
    calls = FORMATS[call_format](text)[:_MAX_CALLS]
    numbered = tuple(_call(value, f"call_{turn}_{place}") for place, value in enumerate(calls))
    return Message(role="assistant", content=text, tool_calls=numbered)


def without_calls(text: str, call_format: str) -> str:
    """Returns the policy's text without its calls."""
    return _TAGGED.sub("", text).strip() if call_format == "tagged" else ""


def write_call(name: str, arguments: Mapping[str, object], call_format: str) -> str:
    """Returns a call as a policy writes it."""
    if call_format == "json":
        return json.dumps({"name": name, "parameters": arguments})
    return f"{_OPEN}{json.dumps({'name': name, 'arguments': arguments})}{_CLOSE}"


def format_of(template: str) -> str:
    """Returns the format of calls in a chat template; `tagged` if it has none."""
    if _OPEN in template:
        return "tagged"
    return "json" if '"parameters"' in template and "ipython" in template else "tagged"


def _tagged(text: str) -> list[object]:
    """Reads `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, each with one call or a list."""
    values: list[object] = []
    for body in _TAGGED.findall(text):
        value = _json(body)
        values += value if isinstance(value, list) else [value]
    return values


def _bare(text: str) -> list[object]:
    """Reads a text that is only `{"name": ..., "parameters": {...}}`."""
    body = text.strip()
    if not body.startswith(("{", "[")):
        return []
    value = _json(body)
    return value if isinstance(value, list) else [value]


FORMATS: Mapping[str, Callable[[str], list[object]]] = {"tagged": _tagged, "json": _bare}


def check_format(name: str) -> None:
    """Raises ConfigError for a format that does not exist."""
    if name not in FORMATS:
        raise ConfigError(f"rollout.episode.call_format={name!r}: choose auto, {', '.join(FORMATS)}")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"it is not JSON ({error})"


def _call(value: object, call_id: str) -> ToolCall:
    def bad(problem: str, name: str = "") -> ToolCall:
        return ToolCall(call_id=call_id, name=name, arguments={}, problem=problem)

    if isinstance(value, str):
        return bad(value[:200])
    if not isinstance(value, dict):
        return bad("it is no JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return bad('it has no "name"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        return bad('its "arguments" are no JSON object', name)
    return ToolCall(call_id=call_id, name=name, arguments=arguments)
