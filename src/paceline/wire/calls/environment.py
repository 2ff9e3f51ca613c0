"""Converts chat messages, tools and grades to protobuf and back; checked on both sides of the service."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from paceline.core.errors import InvalidMessageError
from paceline.core.samples.chat import Message, ToolCall, ToolSpec
from paceline.core.text import encodable
from paceline.rpc.v1 import environment_pb2 as pb
from paceline.wire.fields import reject
from paceline.wire.json_object import read_json_object, write_json_object
from paceline.wire.records import from_proto, to_proto

ENVIRONMENT_CONTRACT: Final = 1
"""The version of `EnvironmentService` that this package speaks."""

_ROLES = ("system", "user", "assistant", "tool")
_MAX_CALLS = 256


def message_to_proto(message: Message) -> pb.ChatMessage:
    """Encodes a message; escapes lone surrogates and notes arguments that JSON cannot hold."""
    calls = [_call_to_proto(call) for call in message.tool_calls]
    content, name = encodable(message.content), encodable(message.name)
    return to_proto(message, pb.ChatMessage, content=content, tool_calls=calls, name=name)


def message_from_proto(message: pb.ChatMessage) -> Message:
    """Reads one message of a conversation.

    Raises:
        InvalidMessageError: the role is unknown, the content too long, or arguments are not a JSON object.
    """
    if message.role not in _ROLES:
        reject("ChatMessage", "unknown_value", f"role {message.role[:40]!r}, wanted {', '.join(_ROLES)}")
    if len(message.tool_calls) > _MAX_CALLS:
        reject("ChatMessage", "too_large", f"{len(message.tool_calls)} tool calls, at most {_MAX_CALLS}")
    calls = tuple(_call_from_proto(call) for call in message.tool_calls)
    return from_proto(message, Message, tool_calls=calls)


def messages_from_proto(messages: Iterable[pb.ChatMessage]) -> tuple[Message, ...]:
    """Reads messages; raises the same errors as `message_from_proto`."""
    return tuple(message_from_proto(message) for message in messages)


def tool_to_proto(tool: ToolSpec) -> pb.ToolDescription:
    """Writes a tool's description; raises InvalidMessageError if its schema is not plain data."""
    parameters = write_json_object(tool.parameters, "ToolDescription")
    return to_proto(tool, pb.ToolDescription, without=("parameters",), parameters_json=parameters)


def tool_from_proto(message: pb.ToolDescription) -> ToolSpec:
    """Reads the description of a tool.

    Raises:
        InvalidMessageError: there is no name, or the schema is not a JSON object.
    """
    if not message.name:
        reject("ToolDescription", "missing_field", "no name")
    parameters = read_json_object(message.parameters_json, "ToolDescription")
    return from_proto(message, ToolSpec, parameters=parameters)


def grade_from_proto(message: pb.EpisodeGrade) -> tuple[float | None, dict[str, float]]:
    """Reads the reward, None if there is none, and the components.

    Raises:
        InvalidMessageError: a number is not finite.
    """
    reward = message.reward if message.HasField("reward") else None
    components = dict(message.components)
    for name, value in {"reward": reward or 0.0, **components}.items():
        if not math.isfinite(value):
            reject("EpisodeGrade", "not_finite", f"{name[:80]} is {value}")
    return reward, components


def _call_to_proto(call: ToolCall) -> pb.ChatToolCall:
    problem, arguments = call.problem, "{}"
    try:
        arguments = write_json_object(call.arguments, "tool call")
    except InvalidMessageError as error:
        problem = problem or str(error)
    return pb.ChatToolCall(
        call_id=call.call_id, name=encodable(call.name), arguments_json=arguments, problem=encodable(problem)
    )


def _call_from_proto(message: pb.ChatToolCall) -> ToolCall:
    return from_proto(message, ToolCall, arguments=read_json_object(message.arguments_json, "ChatToolCall"))
