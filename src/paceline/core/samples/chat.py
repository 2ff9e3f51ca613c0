"""Chat messages and tools, as environments and chat templates know them; token ids are not part of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call that the policy wrote; `problem` says why it cannot be carried out, "" if it can."""

    call_id: str
    name: str
    arguments: Mapping[str, object]
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSpec:
    """What a model is told of a tool; `parameters` is a JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, object]

    def to_template(self) -> dict[str, object]:
        """Returns the form that chat templates take."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message; `role` is system, user, assistant or tool.

    `tool_calls` are an assistant's; `name` and `call_id` say which call a tool's message answers.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""
    call_id: str = ""
