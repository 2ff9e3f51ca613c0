"""OpenAI's chat completions as data: requests and answers. Nothing here waits.

The client supplies the conversation, and the run decides how to sample: a model, temperature or seed in the
request is ignored and reported as such. Options that would change the form of an answer are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.samples.chat import Message, ToolCall, ToolSpec
from paceline.core.text import encodable

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_HARMLESS = {
    *("messages", "tools", "stream", "stream_options", "max_tokens", "max_completion_tokens", "user"),
    *("store", "metadata", "service_tier", "prompt_cache_key", "safety_identifier", "parallel_tool_calls"),
}
_MAX_VALUES = 2**18
"""Most lists and objects in a body: while they are parsed, nothing else can run."""
_PIECE_CHARS = 64
"""Characters of an answer's text in one event of a stream."""


ToChat = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Converts the body of a request in another form to a chat completion's."""


class RefusedRequestError(Exception):
    """A request that gets no answer: the status and the body say why."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> dict[str, object]:
        """Returns the refusal in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """What a client asks for.

    `max_tokens` is None if the client sets no limit. `ignored` names the settings that are not applied.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    max_tokens: int | None = None
    is_streamed: bool = False
    has_usage: bool = False
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatAnswer:
    """One answer of the policy.

    `problems` are calls that cannot be made; `text` contains them. `ignored` is the request's.
    """

    answer_id: str
    model: str
    created: int
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    num_prompt_tokens: int
    num_answer_tokens: int
    problems: tuple[ToolCall, ...] = ()
    ignored: tuple[str, ...] = ()


def read_request(
    data: bytes,
    *,
    model: str,
    temperature: float,
    to_chat: ToChat | None = None,
) -> ChatRequest:
    """Reads the body of a request.

    Args:
        data: JSON.
        model, temperature: name and temperature of the run's policy.
        to_chat: converts a request in another form; None if it is a chat completion's.

    Raises:
        RefusedRequestError: the body is not such a request, or has options that a policy under training does
            not support.
    """
    if data.count(b"[") + data.count(b"{") > _MAX_VALUES:
        raise bad_request(f"the body has more than {_MAX_VALUES} brackets")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise bad_request("the body is no JSON object")
    body = to_chat(body) if to_chat is not None else body
    _refuse_forms(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request('"messages" must be a list with at least one message')
    options, tools = body.get("stream_options") or {}, body.get("tools") or []
    if not isinstance(tools, list):
        raise bad_request('"tools" must be a list')
    return ChatRequest(
        messages=tuple(_message(message) for message in messages),
        tools=tuple(_tool(tool) for tool in tools),
        max_tokens=_max_tokens(body),
        is_streamed=bool(body.get("stream")),
        has_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        ignored=tuple(sorted(_ignored(body, model, temperature))),
    )


def _refuse_forms(body: Mapping[str, Any]) -> None:
    """Refuses options that would change the policy's answer."""
    response_format = body.get("response_format") or {"type": "text"}
    unwanted = {
        "n": body.get("n") not in (None, 1),
        "stop": bool(body.get("stop")),
        "logit_bias": bool(body.get("logit_bias")),
        "response_format": not isinstance(response_format, dict) or response_format.get("type") != "text",
        "tool_choice": body.get("tool_choice") not in (None, "auto"),
        "functions": bool(body.get("functions")),
        "audio": bool(body.get("audio")),
    }
    for name in (name for name, is_unwanted in unwanted.items() if is_unwanted):
        raise RefusedRequestError(
            400,
            "unsupported_parameter",
            f"{name!r} would change how the policy answers, which is the training run's: leave it out",
        )


def _ignored(body: Mapping[str, Any], model: str, temperature: float) -> Iterator[str]:
    own = {"model": model, "temperature": temperature, "n": 1, "tool_choice": "auto", "top_p": 1}
    for name, value in body.items():
        if name in _HARMLESS or name in ("stop", "logit_bias", "response_format", "functions", "audio"):
            continue
        if value in (None, False, 0, {}, []) and name not in ("temperature", "seed", "top_p"):
            continue
        if value is None or (name in own and value == own[name]):
            continue
        yield ascii(name)[1:-1][:64]


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    given = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    if any(type(value) is not int or value < 1 for value in given):
        raise bad_request('"max_tokens" must be a whole number from 1 on')
    return min(given, default=None)


def _message(value: object) -> Message:
    role = value.get("role") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(role, str) or role not in _ROLES:
        raise bad_request(f"a message has one of the roles {', '.join(_ROLES)}")
    calls = value.get("tool_calls") or []
    if not isinstance(calls, list):
        raise bad_request('"tool_calls" must be a list')
    return Message(
        role=_ROLES[role],
        content=_content(value.get("content")),
        tool_calls=tuple(_call(call) for call in calls),
        name=str(value.get("name") or ""),
        call_id=str(value.get("tool_call_id") or ""),
    )


def _content(value: object) -> str:
    if value is None or isinstance(value, str):
        return encodable(value or "")
    parts = value if isinstance(value, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if any(type(text) is not str for text in texts):
        raise RefusedRequestError(400, "unsupported_content", "the content of a message must be text")
    return encodable("".join(map(str, texts)))


def _call(value: object) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict):
        raise bad_request('a tool call has a "function" with "name" and "arguments"')
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise bad_request(f'the "arguments" of a tool call are not JSON: {error}') from error
    if not isinstance(arguments, dict):
        raise bad_request('the "arguments" of a tool call are no JSON object')
    return ToolCall(
        call_id=str(value.get("id") or ""), name=str(function.get("name") or ""), arguments=arguments
    )


def _tool(value: object) -> ToolSpec:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request('a tool is {"type": "function", "function": {"name": ..., "parameters": {...}}}')
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise bad_request('the "parameters" of a tool are no JSON schema')
    return ToolSpec(
        name=function["name"], description=str(function.get("description") or ""), parameters=parameters
    )


def bad_request(message: str) -> RefusedRequestError:
    """Returns the refusal of a request that does not follow the protocol."""
    return RefusedRequestError(400, "invalid_request", message)


def completion(answer: ChatAnswer) -> dict[str, object]:
    """Returns the answer as one object."""
    message: dict[str, object] = {"role": "assistant", "content": answer.content or None, "refusal": None}
    if answer.tool_calls:
        message["tool_calls"] = _calls(answer.tool_calls)
    if answer.problems:
        message["invalid_tool_calls"] = [
            {"id": call.call_id, "name": call.name, "error": call.problem} for call in answer.problems
        ]
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": answer.finish_reason,
        "logprobs": None,
    }
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def pieces(text: str) -> Iterator[str]:
    """Yields a text in the pieces that the events of a stream carry."""
    for start in range(0, len(text), _PIECE_CHARS):
        yield text[start : start + _PIECE_CHARS]


def block(data: str, name: str = "") -> str:
    """Returns an event of a stream as it is sent."""
    return f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"


def events(answer: ChatAnswer, *, has_usage: bool) -> Iterator[str]:
    """Yields the answer as the events of a stream."""

    def event(delta: Mapping[str, object], finish_reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return block(json.dumps({**_head(answer, "chat.completion.chunk"), "choices": [choice]}))

    yield event({"role": "assistant", "content": ""})
    for piece in pieces(answer.content):
        yield event({"content": piece})
    for place, call in enumerate(_calls(answer.tool_calls)):
        yield event({"tool_calls": [{"index": place, **call}]})
    yield event({}, answer.finish_reason)
    if has_usage:
        last = {**_head(answer, "chat.completion.chunk"), "choices": [], "usage": _usage(answer)}
        yield block(json.dumps(last))
    yield block("[DONE]")


def _head(answer: ChatAnswer, kind: str) -> dict[str, object]:
    return {"id": answer.answer_id, "object": kind, "created": answer.created, "model": answer.model}


def _usage(answer: ChatAnswer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_answer_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_answer_tokens,
    }


def _calls(calls: Sequence[ToolCall]) -> list[dict[str, object]]:
    return [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for call in calls
    ]
