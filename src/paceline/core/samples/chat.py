"""Chat messages and tools in the form that environments and chat templates use; they hold no token ids."""

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
    """The description of a tool for the model; `parameters` is the JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, object]

    def to_template(self) -> dict[str, object]:
        """Returns the form that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message; `role` is system, user, assistant or tool.

    An assistant's message has `tool_calls`; a tool's message names the call that it answers by `name` and
    `call_id`.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""
    call_id: str = ""
