"""Reads the tool calls in the policy's answers. An unreadable call becomes a call with a problem.

tagged  <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
json    {"name": "add", "parameters": {"a": 1}}
xml     <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
glm     <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.samples.chat import Message, ToolCall, ToolSpec

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAGGED = re.compile(re.escape(_OPEN) + r"(.*?)(?:" + re.escape(_CLOSE) + r"|(?=<tool_call>)|\Z)", re.DOTALL)
_MAX_CALLS = 64
_ARGUMENTS_AS_TEXT = ("xml", "glm")
"""Formats in which the types of arguments are those of the tool's schema."""
_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>(.*?)</parameter>\s*", re.DOTALL)
_NAME = re.compile(r"\s*([^<>\s]+)(.*)", re.DOTALL)
_KEY_AND_VALUE = re.compile(r"\s*<arg_key>([^<>]+)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def read_action(text: str, call_format: str, turn: int, tools: Sequence[ToolSpec] = ()) -> Message:
    """Returns the policy's message: its text, and the calls in it.

    Args:
        tools: whose schemas say what an argument is, in formats that write all of them as text.
    """
    calls = FORMATS[call_format](text)[:_MAX_CALLS]
    numbered = [_call(value, f"call_{turn}_{place}") for place, value in enumerate(calls)]
    if call_format in _ARGUMENTS_AS_TEXT:
        schemas = {tool.name: tool.parameters for tool in tools}
        numbered = [_typed(call, schemas.get(call.name, {})) for call in numbered]
    return Message(role="assistant", content=text, tool_calls=tuple(numbered))


def without_calls(text: str, call_format: str) -> str:
    """Returns the policy's text without its calls."""
    return "" if call_format == "json" else _TAGGED.sub("", text).strip()


def write_call(name: str, arguments: Mapping[str, object], call_format: str) -> str:
    """Returns a call as a policy writes it."""
    if call_format == "json":
        return json.dumps({"name": name, "parameters": arguments})
    if call_format == "tagged":
        return f"{_OPEN}{json.dumps({'name': name, 'arguments': arguments})}{_CLOSE}"
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    if call_format == "xml":
        inner = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
        return f"{_OPEN}\n<function={name}>\n{inner}</function>\n{_CLOSE}"
    inner = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items()
    )
    return f"{_OPEN}{name}\n{inner}{_CLOSE}"


def format_of(template: str) -> str:
    """Returns the format of calls in a chat template; `tagged` if it has none."""
    if _OPEN in template:
        return "xml" if "<function=" in template else "glm" if "<arg_key>" in template else "tagged"
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


def _xml(text: str) -> list[object]:
    """Reads calls that name the function and each of its parameters in tags (Qwen 3 Coder, Qwen 3.5)."""
    return [
        _named(_FUNCTION.fullmatch(body), _PARAMETER, "it is not <function=NAME>...</function>")
        for body in _TAGGED.findall(text)
    ]


def _glm(text: str) -> list[object]:
    """Reads calls with a name, and tags around each key and each value (GLM-4.5)."""
    return [
        _named(_NAME.fullmatch(body), _KEY_AND_VALUE, "it does not begin with a tool's name")
        for body in _TAGGED.findall(text)
    ]


def _named(call: re.Match[str] | None, pair: re.Pattern[str], problem: str) -> object:
    """Returns the call, with its arguments as text; `problem` if there is none, or what is wrong with it."""
    if call is None:
        return problem
    arguments, place = {}, 0
    name, inner = call.groups()
    inner = inner.strip()
    while place < len(inner):
        match = pair.match(inner, place)
        if match is None:
            return f"its arguments cannot be read from {inner[place : place + 40]!r} on"
        key, value = match.groups()
        arguments[key.strip()] = value.removeprefix("\n").removesuffix("\n")
        place = match.end()
    return {"name": name.strip(), "arguments": arguments}


FORMATS: Mapping[str, Callable[[str], list[object]]] = {
    "tagged": _tagged,
    "json": _bare,
    "xml": _xml,
    "glm": _glm,
}


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


def _typed(call: ToolCall, schema: Mapping[str, Any]) -> ToolCall:
    """Returns the call with its arguments as the tool's schema has them; text where they are no JSON."""
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    return replace(
        call, arguments={key: _value(str(text), known.get(key)) for key, text in call.arguments.items()}
    )


def _value(text: str, schema: object) -> object:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return text
    try:
        return json.loads(text.lower() if kind == "boolean" else text)
    except (ValueError, RecursionError):
        return text
