"""Turns an agent, a function that requests the policy's answers over HTTP, into an environment."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.samples.episode import OVER_CODE, OVER_MESSAGE
from paceline.core.text import one_line
from paceline.sdk.environment import Environment, Observation, Outcome, environment_maker

_log = logging.getLogger(__name__)


def agent(function: Callable[..., Any]) -> Callable[[], Environment]:
    """Turns an agent into an argument of `serve_environment`; the run sets `environment.drives`.

    Args:
        function: `f(task, *, base_url, token, model)`, plain or async: plays one episode and returns its
            reward, an `Outcome`, or None if another scorer gives the reward. A plain function runs in a
            thread, which cannot be ended: give its client a timeout.
    """

    return environment_maker(getattr(function, "__name__", "agent"), lambda: _Agent(function))


class _Agent(Environment):
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._task: Mapping[str, Any] = {}
        self._outcome = Outcome()

    async def open(self, task: Mapping[str, Any], *, task_seed: int, episode_seed: int) -> Observation:
        self._task = {**task, "task_seed": task_seed, "episode_seed": episode_seed}
        return Observation()

    async def run(self, *, base_url: str, token: str, model: str) -> str:
        try:
            self._outcome = _outcome_of(await self._play(base_url=base_url, token=token, model=model))
        except Exception as error:
            if not _is_over(error):
                raise
            _log.info("%s ended by %s", getattr(self._function, "__name__", "agent"), one_line(str(error)))
        return ""

    async def _play(self, **options: str) -> object:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(self._task, **options)
        return await asyncio.to_thread(self._function, self._task, **options)

    async def close(self, stop_reason: str) -> Outcome:
        return self._outcome


def _is_over(error: BaseException | None) -> bool:
    """Returns whether an agent raised because the rollout server had ended its episode, for any client."""
    while error is not None:
        if getattr(error, "code", None) == OVER_CODE or OVER_MESSAGE in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _outcome_of(returned: object) -> Outcome:
    if isinstance(returned, Outcome):
        return returned
    if returned is None:
        return Outcome()
    if isinstance(returned, bool | int | float):
        return Outcome(reward=float(returned))
    raise TypeError(f"an agent returns a number, an Outcome or None, not {type(returned).__name__}")
