"""Wraps unchanged environments of the library `verifiers`, which drive their own episodes.

Handles classic environments of the releases 0.1 to 0.3, which have `run_rollout`; passes those of
`verifiers.v1` to `verifiers_v1`. The library runs in the user's process, which may be a separate installation
with `paceline-sdk`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.samples.episode import OVER_MESSAGE
from paceline.core.text import one_line
from paceline.sdk.adapters.verifiers_v1 import is_v1, v1_environment, v1_rows
from paceline.sdk.agent import agent
from paceline.sdk.environment import Environment, Outcome


def verifiers_environment(environment: Any, *, timeout_s: float = 600.0) -> Callable[[], Environment]:
    """Turns the result of the library's `load_environment` into an argument of `serve_environment`.

    The run's configuration sets `environment.drives`, and trains on the rows of `verifiers_rows`. The reward
    is the library's; its metrics become components. An environment of `verifiers.v1` comes from
    `load_environment(SingleAgentEnvConfig.model_validate({"taskset": {"id": "NAME"}, "agent": agent}))` with
    `agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}`.

    Args:
        environment: environment of `verifiers` or `verifiers.v1`; may play any number of episodes at a time.
        timeout_s: deadline of each answer of the policy; `verifiers.v1` has its own.

    Raises:
        ConfigError: this is not an environment of the library, its rubric compares the samples of a prompt,
            or several of its agents use the policy.
    """
    if is_v1(environment):
        return v1_environment(environment)
    if not callable(getattr(environment, "run_rollout", None)):
        raise ConfigError(
            f"{type(environment).__name__} has neither run_rollout, as classic environments of verifiers, "
            "nor run_episode and a taskset, like those of verifiers.v1; pass what load_environment returns, "
            "or write an agent that plays this environment"
        )
    if getattr(environment, "requires_group_rollouts", False):
        raise ConfigError(
            f"the rubric of {type(environment).__name__} grades the samples of a prompt together, and "
            "episodes are graded one by one; take a reward function that scores groups in its place"
        )

    async def play(task: Mapping[str, Any], *, base_url: str, token: str, model: str) -> Outcome:
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        async with AsyncOpenAI(base_url=base_url, api_key=token, timeout=timeout_s) as client:
            played = await environment.run_rollout(
                _rollout_input(task), OpenAIChatCompletionsClient(client), model, {}
            )
        return _outcome(played)

    play.__name__ = type(environment).__name__
    return agent(play)


def verifiers_rows(environment: Any, split: str = "train") -> Iterator[dict[str, Any]]:
    """Yields the rows of an environment in the form of `data.train_files`.

    Set `data.extra_keys: [example_id, info]`, or `[task]` for an environment of `verifiers.v1`.

    Args:
        environment: as in `verifiers_environment`.
        split: "train", or "val" for the library's evaluation split; without such a split there are no rows,
            as in `verifiers.v1`.

    Raises:
        ConfigError: a taskset of `verifiers.v1` is endless, or its tasks cannot be serialised.
    """
    if is_v1(environment):
        yield from v1_rows(environment, split)
        return
    rows = environment.build_dataset() if split == "train" else environment.build_eval_dataset()
    for row in rows or ():
        yield {
            "prompt": [_message(message) for message in row["prompt"]],
            "ground_truth": str(row.get("answer") or ""),
            "data_source": type(environment).__name__,
            "example_id": row["example_id"],
            "info": row["info"] if isinstance(row.get("info"), str) else json.dumps(row.get("info") or {}),
        }


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}


def _rollout_input(task: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "prompt": task["messages"],
        "answer": task["ground_truth"],
        "example_id": task.get("example_id", 0),
        "info": task.get("info", "{}"),
    }


def _outcome(played: Mapping[str, Any]) -> Outcome:
    """Returns the outcome of a rollout.

    Raises:
        RuntimeError: the rollout failed, but not because of a limit of the run.
    """
    error = played.get("error")
    if error and OVER_MESSAGE not in str(error):
        raise RuntimeError(one_line(f"the rollout failed: {error}"))
    metrics = {name: float(value) for name, value in (played.get("metrics") or {}).items()}
    return Outcome(reward=float(played["reward"] or 0.0), components=metrics)
