"""Wraps environments with `reset` and `step`, which return tuples (Gymnasium) or objects (OpenEnv)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.samples.chat import Message
from paceline.sdk.environment import Environment, Observation, Outcome, environment_maker


def gym_environment(
    make: Callable[[], Any],
    *,
    to_action: Callable[[str], Any] = str.strip,
    to_text: Callable[[Any], str] = str,
) -> Callable[[], Environment]:
    """Turns a library's environment into an argument of `serve_environment`.

    `reset(seed=...)` returns (observation, info), an observation, or a result with the attribute
    `observation`. `step(action)` returns (observation, reward, terminated, truncated, info), or a result with
    `observation`, `reward`, `done`. Both may be async; plain functions run in threads. The episode's reward
    is the sum over its steps; an action that `to_action` cannot read ends it with the reason `no_action`.

    Args:
        make: makes one environment, for one episode.
        to_action: converts an answer of the policy to an action; raises ValueError if it cannot.
        to_text: converts an observation to text for the policy.
    """

    name = getattr(make, "__name__", "gym")
    return environment_maker(name, lambda: _Gym(make, to_action, to_text))


class _Gym(Environment):
    def __init__(
        self, make: Callable[[], Any], to_action: Callable[[str], Any], to_text: Callable[[Any], str]
    ) -> None:
        self._make, self._to_action, self._to_text = make, to_action, to_text
        self._inner: Any = None
        self._reward, self._num_steps = 0.0, 0

    async def open(self, task: Mapping[str, Any], *, task_seed: int, episode_seed: int) -> Observation:
        self._inner = await asyncio.to_thread(self._make)
        takes = inspect.signature(self._inner.reset).parameters
        options = {"seed": task_seed} if "seed" in takes or "kwargs" in takes else {}
        result = await self._called("reset", **options)
        if hasattr(result, "observation"):
            first = result.observation
        else:
            first = result[0] if isinstance(result, tuple) else result
        return Observation(text=self._to_text(first))

    async def step(self, action: Message) -> Observation:
        try:
            taken = self._to_action(action.content)
        except ValueError:
            return Observation(done="no_action")
        result = await self._called("step", taken)
        if isinstance(result, tuple):
            observation, reward, terminated, truncated, _ = result
            done = "terminated" if terminated else "truncated" if truncated else ""
        else:
            observation, reward = result.observation, result.reward
            done = "terminated" if result.done else ""
        self._num_steps += 1
        self._reward += float(reward or 0.0)
        return Observation(text=self._to_text(observation), done=done)

    async def close(self, stop_reason: str) -> Outcome:
        return Outcome(reward=self._reward, components={"steps": float(self._num_steps)})

    async def release(self) -> None:
        if hasattr(self._inner, "close"):
            await self._called("close")

    async def _called(self, name: str, *arguments: Any, **options: Any) -> Any:
        method = getattr(self._inner, name)
        # In an event loop, a client of OpenEnv returns an awaitable; in a thread it would start its own loop,
        # which nothing ends.
        if inspect.iscoroutinefunction(method) or hasattr(type(self._inner), "__aenter__"):
            result = method(*arguments, **options)
            return await result if inspect.isawaitable(result) else result
        return await asyncio.to_thread(method, *arguments, **options)
