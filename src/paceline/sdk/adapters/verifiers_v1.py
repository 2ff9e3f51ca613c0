"""Wraps unchanged environments of `verifiers.v1`; a harness of the library drives each episode.

Supports the releases 0.3 and 0.4. The harness calls a local server of the library, which records the
conversation for grading and forwards each request to the episode's address.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.samples.episode import OVER_MESSAGE
from paceline.core.text import one_line
from paceline.sdk.agent import agent
from paceline.sdk.environment import Environment, Outcome


def is_v1(environment: object) -> bool:
    """Returns whether `verifiers.v1.load_environment` made this object."""
    return callable(getattr(environment, "run_episode", None)) and hasattr(environment, "taskset")


def v1_environment(environment: Any) -> Callable[[], Environment]:
    """Returns an argument of `serve_environment`; see `verifiers_environment`.

    Raises:
        ConfigError: several of its agents use the policy, or the agent that uses it retries by itself.
    """
    role = _role_of_policy(environment)
    shared = _Shared(environment)

    async def play(task: Mapping[str, Any], *, base_url: str, token: str, model: str) -> Outcome:
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        await shared.ready()
        # The library reads keys from variables, and hides those with API_KEY in their name from harnesses.
        variable = f"PACELINE_API_KEY_{uuid.uuid4().hex}"
        os.environ[variable] = token
        try:
            client = EvalClientConfig(base_url=base_url, api_key_var=variable)
            context = ModelContext(model=model, client=client)
            episode = await environment.run_episode(_task(environment, task), context)
        finally:
            del os.environ[variable]
        return _outcome(episode, role)

    play.__name__ = environment.config.env_id
    return agent(play)


def v1_rows(environment: Any, split: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of its taskset; see `verifiers_rows`.

    Raises:
        ConfigError: the taskset is endless, or its tasks cannot be serialised.
    """
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.types import SystemMessage, UserMessage

    taskset = environment.taskset
    if not getattr(taskset, "bounded", not taskset.INFINITE):
        raise ConfigError(
            f"{type(taskset).__name__} has no end; set environment.taskset to a part of it: "
            "environment.taskset.head(1000), or take(1000) from verifiers 0.4 on"
        )
    for task in taskset if split == "train" else ():
        data = task.data
        excluded = [name for name, field in type(data).model_fields.items() if field.exclude]
        if excluded:
            raise ConfigError(
                f"{type(data).__name__} leaves {', '.join(excluded)} out of what it writes, so that its "
                "tasks cannot become rows; drop exclude=True"
            )
        messages = [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt or []
        if data.system_prompt is not None:
            messages = [SystemMessage(content=data.system_prompt), *messages]
        yield {
            "prompt": [message_to_wire(message) for message in messages] or [{"role": "user", "content": ""}],
            "ground_truth": "",
            "data_source": environment.config.env_id,
            "task": data.model_dump_json(),
        }


class _Shared:
    """Holds what an environment's episodes share, from the first one until the event loop ends."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._entered: asyncio.Future[None] | None = None
        self._holding: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Waits until the shared parts have started.

        Raises:
            Exception: any error of the library at the start.
        """
        if self._entered is None or self._holding is None or self._holding.done():
            self._entered = asyncio.get_running_loop().create_future()
            self._holding = asyncio.create_task(self._hold(self._entered), name="verifiers")
        await asyncio.shield(self._entered)

    async def _hold(self, entered: asyncio.Future[None]) -> None:
        try:
            async with self._environment.serving():
                # Shared servers keep a client for every key that they have seen; without them each episode
                # gets its own server.
                self._environment._interception = None
                entered.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:
            if entered.done():
                raise
            entered.set_exception(error)
        finally:
            entered.cancel()


def _role_of_policy(environment: Any) -> str:
    """Returns the only agent that uses the policy."""
    config = environment.config
    roles: list[str] = [name for name in config.agent_harnesses() if getattr(config, name).client is None]
    if len(roles) != 1:
        raise ConfigError(
            f"{type(environment).__name__} has {len(roles)} agents that ask the policy ({', '.join(roles)}), "
            "and an episode has one reward; give all but one a client of their own in its configuration"
        )
    [role] = roles
    retries = getattr(config, role).retries.max_retries
    if retries:
        raise ConfigError(
            f"{role}.retries.max_retries is {retries}: what an agent sampled before it begins again would be "
            "trained on; set it to 0, and the run begins the episode again"
        )
    return role


def _task(environment: Any, row: Mapping[str, Any]) -> Any:
    """Returns the task of a row of `v1_rows`.

    Raises:
        ValueError: the row has no task.
    """
    if "task" not in row:
        raise ValueError("the row has no column task: the run's configuration needs data.extra_keys: [task]")
    make = type(environment.taskset).task_type()
    return make(make.data_type().model_validate_json(row["task"]), environment.config.taskset.task)


def _outcome(episode: Any, role: str) -> Outcome:
    """Returns the outcome of an episode.

    Raises:
        RuntimeError: the episode failed, but not because of a limit of the run, or the agent did not run
            exactly once.
    """
    errors = [error for part in (*episode.traces, episode) for error in part.errors]
    if not episode.ok and not any(OVER_MESSAGE in error.message for error in errors):
        said = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise RuntimeError(one_line(f"the episode failed: {said}"))
    traces = [trace for trace in episode.traces if trace.agent.name == role]
    if len(traces) != 1:
        raise RuntimeError(
            f"{role} ran {len(traces)} times in one episode, each time with a reward; an episode has one"
        )
    [trace] = traces
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return Outcome(reward=trace.reward, components={**metrics, **rewards})
