"""Base classes for environments: tools, observations and outcomes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from paceline.core.errors import ConfigError
from paceline.core.samples.chat import Message, ToolCall, ToolSpec
from paceline.core.text import one_line
from paceline.core.user_functions.tool_function import argument_problem, describe_tool, result_text

_Method = TypeVar("_Method", bound=Callable[..., Any])
_MARK = "__paceline_tool__"


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The text that the policy reads next.

    Attributes:
        text: one message; from `open`, a user message after those of the prompt. "": none.
        messages: several messages, instead of `text`.
        tools: from `open`: the environment's tools that this episode has; None: all.
        done: ends the episode, with this stop reason; "": the episode goes on.
    """

    text: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[str, ...] | None = None
    done: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of an episode: a finite reward, or None, and further numbers."""

    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)


def tool(timeout_s: float = 10.0) -> Callable[[_Method], _Method]:
    """Marks a method as a tool; its docstring and annotations describe it to the model.

    A plain method runs in a thread, which cannot be ended: after `timeout_s` its answer is ignored.
    """

    def mark(method: _Method) -> _Method:
        setattr(method, _MARK, timeout_s)
        return method

    return mark


class Environment:
    """Answers the policy in one episode.

    Override `open`, `step` and `close` if their defaults do not suffice; all are async.

    Any exception ends the attempt: the rollout server restarts the episode with a new instance.
    """

    tools: ClassVar[Mapping[str, tuple[ToolSpec, float]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        by_name: dict[str, tuple[ToolSpec, float]] = {}
        for name, method in inspect.getmembers(cls, inspect.isfunction):
            if hasattr(method, _MARK):
                bound = method.__get__(object())  # without self
                spec = describe_tool(f"{cls.__name__}.{name}", bound)
                by_name[name] = (spec, getattr(method, _MARK))
        cls.tools = by_name

    async def open(self, task: Mapping[str, Any], *, task_seed: int, episode_seed: int) -> Observation:
        """Begins an episode; the default adds no message.

        Args:
            task: the prompt's row: `messages`, `ground_truth`, `data_source` and data.extra_keys.
            task_seed: equal in all episodes of a prompt, which should begin alike.
            episode_seed: differs between these episodes.
        """
        return Observation()

    async def step(self, action: Message) -> Observation:
        """Answers a turn: by default, makes its tool calls, and ends the episode at a turn without any.

        Args:
            action: the policy's turn. `content` is its text without special tokens, calls included;
                `tool_calls` are objects with `name`, `arguments` (a dict), `call_id` and `problem`.
        """
        return await self.call_tools(action)

    async def run(self, *, base_url: str, token: str, model: str) -> str:
        """Drives the whole episode if `rollout.environment.drives` is set; replaces `step`.

        Args:
            base_url, token: address and token of this episode, for any client of OpenAI's chat completions.
            model: the policy's name at that address.

        Returns:
            Why the episode ended, in a word; "" for no particular reason.
        """
        raise NotImplementedError(f"{type(self).__name__} does not lead episodes: write `run`")

    async def close(self, stop_reason: str) -> Outcome:
        """Grades the episode; the default gives no reward."""
        return Outcome()

    async def release(self) -> None:
        """Frees the instance's resources; called once, after or instead of `close`."""

    async def call_tools(self, action: Message, *, done: str = "") -> Observation:
        """Makes a turn's calls one after another; a failing call is answered with "error:" and the reason.

        Args:
            action: the turn.
            done: as in `Observation`; a turn without calls ends the episode as "answered".
        """
        answers = []
        for call in action.tool_calls:
            text = await self._answer(call)
            answers.append(Message(role="tool", content=text, name=call.name, call_id=call.call_id))
        return Observation(messages=tuple(answers), done=done or ("" if answers else "answered"))

    async def invoke(self, name: str, arguments: Mapping[str, object]) -> object:
        """Calls a tool, by default the method of this name, and returns its result."""
        method = getattr(self, name)
        if inspect.iscoroutinefunction(method):
            return await method(**arguments)
        return await asyncio.to_thread(method, **arguments)

    async def _answer(self, call: ToolCall) -> str:
        spec, timeout_s = self.tools.get(call.name, (None, 0.0))
        if call.problem or spec is None:
            known = ", ".join(self.tools) or "none"
            return f"error: {call.problem or f'there is no tool {call.name[:80]!r}; there are {known}'}"
        problem = argument_problem(spec, call.arguments)
        if problem:
            return f"error: {problem}"
        try:
            async with asyncio.timeout(timeout_s):
                return result_text(await self.invoke(call.name, call.arguments))
        except TimeoutError:
            return f"error: {call.name} did not answer within {timeout_s:g} s"
        except Exception as error:  # noqa: BLE001  user code: what it raises is the call's answer
            return one_line(f"error: {type(error).__name__}: {error}")


def environment_maker(name: str, make: Callable[[], Environment]) -> Callable[[], Environment]:
    """Gives a function that makes an environment the name under which a server shows it."""
    make.__name__ = name
    return make


def specs_for(environment: Environment, names: Sequence[str] | None) -> list[ToolSpec]:
    """Returns the tools of an episode.

    Raises:
        ConfigError: a name is not a tool of the class.
    """
    known = environment.tools
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ConfigError(
            f"{type(environment).__name__}.open names the tool {unknown[0]!r}; its tools are "
            f"{', '.join(known) or 'none'}: mark a method with @tool()"
        )
    return [known[name][0] for name in (known if names is None else names)]
