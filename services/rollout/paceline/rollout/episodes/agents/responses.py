"""Converts requests and answers of OpenAI's Responses API from and to chat completions.

Nothing is stored here between requests, because each request carries its conversation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.rollout.episodes.agents.completions import (
    ChatAnswer,
    RefusedRequestError,
    bad_request,
    block,
    pieces,
)

_STORED = ("previous_response_id", "conversation", "prompt", "background")
_CONSUMED = {"input", "instructions", "tools", "max_output_tokens", "text", *_STORED}
_OF_A_TOOL = ("name", "description", "parameters")


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the request to the body of a chat completion.

    Raises:
        RefusedRequestError: the request relies on stored answers, or has items other than text and calls.
    """
    for name in _STORED:
        if body.get(name):
            raise RefusedRequestError(
                400, "unsupported_parameter", f"{name!r} needs stored answers: send the entire conversation"
            )
    chat = {name: value for name, value in body.items() if name not in _CONSUMED}
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise bad_request('"input" must be a text, or a list with at least one item')
    said = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    chat["messages"] = [*said, *_messages(items)]
    if not isinstance(body.get("tools") or [], list):
        raise bad_request('"tools" must be a list')
    if body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in body["tools"]]
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    text = body.get("text")
    if isinstance(text, dict) and text.get("format"):
        chat["response_format"] = text["format"]
    return chat


def _messages(items: list[Any]) -> list[dict[str, Any]]:
    """Joins an answer's text and its calls, which are separate items here, in one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        message = _message(item)
        last = messages[-1] if messages else {}
        if "tool_calls" in message and last.get("role") == "assistant":
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
        else:
            messages.append(message)
    return messages


def _message(item: Any) -> dict[str, Any]:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    raise RefusedRequestError(
        400,
        "unsupported_content",
        f"an item of the input is a message, a function_call or its output, not {str(kind)[:40]!r}",
    )


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise bad_request('a tool is {"type": "function", "name": ..., "parameters": {...}}')
    return {"type": "function", "function": {name: tool.get(name) for name in _OF_A_TOOL}}


def response(answer: ChatAnswer) -> dict[str, object]:
    """Returns the answer as one object."""
    is_cut = answer.finish_reason == "length"
    return {
        **_begun(answer),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _output(answer),
        "usage": {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.num_answer_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_prompt_tokens + answer.num_answer_tokens,
        },
    }


def response_events(answer: ChatAnswer) -> Iterator[str]:
    """Yields the answer as the events of a stream."""
    number = 0

    def event(kind: str, /, **fields: object) -> str:
        nonlocal number
        number += 1
        return block(json.dumps({"type": kind, "sequence_number": number - 1, **fields}), kind)

    yield event("response.created", response=_begun(answer))
    for place, item in enumerate(_output(answer)):
        where = {"item_id": item["id"], "output_index": place}
        is_call = item["type"] == "function_call"
        empty: dict[str, object] = {"arguments": ""} if is_call else {"content": []}
        yield event("response.output_item.added", output_index=place, item={**item, **empty})
        if is_call:
            words = {**where, "name": item["name"]}
            yield event("response.function_call_arguments.delta", **where, delta=item["arguments"])
            yield event("response.function_call_arguments.done", **words, arguments=item["arguments"])
        else:
            part = _text(answer.content)
            where["content_index"] = 0
            yield event("response.content_part.added", **where, part=_text(""))
            for piece in pieces(answer.content):
                yield event("response.output_text.delta", **where, delta=piece, logprobs=[])
            yield event("response.output_text.done", **where, text=answer.content, logprobs=[])
            yield event("response.content_part.done", **where, part=part)
        yield event("response.output_item.done", output_index=place, item=item)
    finished = response(answer)
    yield event(f"response.{finished['status']}", response=finished)


def _begun(answer: ChatAnswer) -> dict[str, object]:
    return {
        "id": f"resp_{answer.answer_id}",
        "object": "response",
        "created_at": answer.created,
        "model": answer.model,
        "status": "in_progress",
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }


def _output(answer: ChatAnswer) -> list[dict[str, object]]:
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    items: list[dict[str, object]] = []
    if answer.content or not answer.tool_calls:
        items.append(
            {
                "type": "message",
                "id": f"msg_{answer.answer_id}",
                "role": "assistant",
                "status": status,
                "content": [_text(answer.content)],
            }
        )
    calls: list[dict[str, object]] = [
        {
            "type": "function_call",
            "id": f"fc_{call.call_id}",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": json.dumps(dict(call.arguments)),
            "status": status,
        }
        for call in answer.tool_calls
    ]
    return items + calls


def _text(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
