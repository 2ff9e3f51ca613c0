"""The checks of episodes for `paceline check`: the chat template's self-test, the tools, the environment."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.config.mixture import TrainSet
from paceline.config.rollout import EnvironmentConfig
from paceline.config.run import RunConfig
from paceline.core.errors import (
    ConfigError,
    DataError,
    EnvironmentLackError,
    InvalidMessageError,
    PacelineError,
)
from paceline.core.text import one_line
from paceline.data.prompts import Prompt, stop_token_ids
from paceline.data.reading.prompt_reader import PromptReader
from paceline.rollout.episodes.environment import EnvironmentLostError
from paceline.rollout.episodes.environments.remote import RemoteEnvironment, RemoteEnvironmentOptions
from paceline.rollout.episodes.group import environment_of, load_rules, rules_of
from paceline.rollout.episodes.trial import PlayedEpisode, play_episode
from paceline.rpc.v1.environment_pb2 import EnvironmentDescription
from paceline.service.identity.credentials import Credentials
from paceline.storage.models import local_model
from paceline.wire.calls.environment import ENVIRONMENT_CONTRACT

_MOST_ROWS = 64
"""Number of rows to search for a prompt that fits."""
_AGENT_S = 120.0
"""Longest time for an agent to lead one episode of the check."""


def check_episodes(config: RunConfig) -> str:
    """Checks the requirements of episodes; returns a line of facts.

    Raises:
        PacelineError: the chat template cannot carry several turns, or a tool cannot be used.
    """
    if not config.has_episodes:
        return "none"
    rules = load_rules(config, local_model(config.model, "controller"))
    service = config.rollout.environment
    names = (
        ", ".join(asyncio.run(_call_names(config)))
        if service is None
        else f"of {service.address or service.attached}"
    )
    return (
        f"up to {rules.limits.max_turns} turns; tools {names}; calls are {rules.call_format}, "
        f"answers come in the role {rules.joiner.tool_role}"
    )


def check_environment(config: RunConfig) -> str:
    """Returns a line of facts about the environment at `rollout.environment.address`.

    Raises:
        EnvironmentLackError: the server there is no environment, or speaks another version of the contract.
        ConfigError: the environment refuses the token, or the token's file cannot be read.
    """
    service = config.rollout.environment
    assert service is not None, "there is an address"
    where = f"rollout.environment.address={service.address}"
    try:
        described = asyncio.run(_described(_environment(config, service)))
    except ConfigError as error:
        raise ConfigError(
            f"{where}: {error}; rollout.environment.token_file names the token of an environment that has "
            "one of its own"
        ) from error
    except PacelineError as error:
        raise EnvironmentLackError(
            f"what answers at {where} is no environment ({error}); start one there with serve_environment, "
            "or correct the address"
        ) from error
    if described.contract > ENVIRONMENT_CONTRACT:
        raise EnvironmentLackError(
            f"the environment at {where} speaks version {described.contract} of the contract of "
            f"environments, this Paceline version {ENVIRONMENT_CONTRACT}: upgrade Paceline on the run's "
            "hosts, or serve the environment with an earlier version"
        )
    return f"{one_line(described.name)} at {service.address}, up to {described.max_episodes} episodes"


def check_episode(config: RunConfig) -> str:
    """Plays one episode with the environment at `rollout.environment.address`; returns its outcome as text.

    Raises:
        EnvironmentLackError: the environment failed, or gave no reward, and nothing else gives one.
        ConfigError, DataError, ModelError: there is no prompt to begin with.
    """
    service = config.rollout.environment
    assert service is not None, "there is an address"
    where = f"the environment at rollout.environment.address={service.address}"
    try:
        played = asyncio.run(_played(config, service))
    except InvalidMessageError as error:
        raise ConfigError(f"an episode with {where} cannot begin: {error}") from error
    except EnvironmentLostError as error:
        raise EnvironmentLackError(
            f"{where} did not play one episode to its end: {error}; {_remedy(str(error), service)}"
        ) from error
    outcome = played.outcome
    if outcome.reward is None and not config.reward.has_scorer:
        raise EnvironmentLackError(
            f"{where} ended an episode without a reward, and nothing else gives one: return "
            "Outcome(reward=...) from `close`, or name a scorer in the section `reward`"
            + ("" if service.drives else "; an agent needs rollout.environment.drives: true")
        )
    return _facts(played)


def _facts(played: PlayedEpisode) -> str:
    outcome = played.outcome
    reward = "no reward of its own" if outcome.reward is None else f"reward {outcome.reward:g}"
    numbers = ", ".join(f"{name} {value:g}" for name, value in outcome.components.items())
    said = one_line(played.first_answer)
    said = f"{said[:60]}..." if len(said) > 60 else said
    return (
        f"one, played by a script: {outcome.num_turns} turn(s), {outcome.num_tool_calls} call(s), ended by "
        f"{outcome.stop_reason}; {reward}{f' ({numbers})' if numbers else ''}"
        + (f"; it said to the first turn: {said}" if said else "")
    )


def _remedy(said: str, service: EnvironmentConfig) -> str:
    if service.drives and "does not serve this method" in said:
        return "serve an agent there, or leave rollout.environment.drives out"
    if service.drives:
        return "mend the agent; the log of its process says where it failed"
    return "mend its `open`, `step` or `close`; the log of its process says where it failed"


async def _played(config: RunConfig, service: EnvironmentConfig) -> PlayedEpisode:
    environment = _environment(config, service)
    try:
        await environment.describe()  # connects
        rows = [] if config.data.training_sets else await environment.first_tasks(_MOST_ROWS)
        reader = await asyncio.to_thread(PromptReader.of, config)
        model = local_model(config.model, "controller")
        stops = stop_token_ids(model.path, reader.tokenizer)
        return await play_episode(
            await asyncio.to_thread(_first_prompt, config, reader, rows),
            environment,
            rules=rules_of(config, reader.tokenizer, stops),
            stop_token_ids=stops,
            drives=service.drives,
        )
    finally:
        await environment.close()


def _first_prompt(config: RunConfig, reader: PromptReader, rows: Sequence[dict[str, object]]) -> Prompt:
    """Returns the first prompt that fits, from the data files or the environment's rows."""
    if config.data.training_sets:
        part = config.data.training_sets[0]
        most = min(part.max_prompts or _MOST_ROWS, _MOST_ROWS)
        return next(iter(reader.read(replace(part, max_prompts=most)).prompts.values()))
    if not rows:
        raise DataError(
            "the environment has no rows for training: let it serve some, or set data.train_files"
        )
    with tempfile.TemporaryDirectory(prefix="paceline-check-") as folder:
        file = Path(folder, "tasks.jsonl")
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        part = TrainSet(name="", files=(str(file),), weight=1.0, max_prompts=None)
        return next(iter(reader.read(part).prompts.values()))


def _environment(config: RunConfig, service: EnvironmentConfig) -> RemoteEnvironment:
    """Returns a client. Any token stands for the run's own, which `paceline train` makes at its start."""
    credentials = Credentials.from_env().with_token("check")
    options = RemoteEnvironmentOptions.of(service, turn_s=service.call_s, credentials=credentials)
    return RemoteEnvironment(replace(options, run_s=min(config.request_timeout_s, _AGENT_S)))


async def _described(environment: RemoteEnvironment) -> EnvironmentDescription:
    try:
        return await environment.describe()
    finally:
        await environment.close()


async def _call_names(config: RunConfig) -> list[str]:
    environment = environment_of(config, Credentials.from_env())
    try:
        await environment.start()
        return list(environment.call_names)
    finally:
        await environment.close()
