"""What `paceline check` says of episodes: the chat template's self-test, the tools, the environment."""

from __future__ import annotations

import asyncio

from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError, EnvironmentLackError, PacelineError
from paceline.core.text import one_line
from paceline.rollout.episodes.environments.remote import RemoteEnvironment, RemoteEnvironmentOptions
from paceline.rollout.episodes.group import environment_of, load_rules
from paceline.rpc.v1.environment_pb2 import EnvironmentDescription
from paceline.service.identity.credentials import Credentials
from paceline.storage.models import local_model
from paceline.wire.calls.environment import ENVIRONMENT_CONTRACT


def check_episodes(config: RunConfig) -> str:
    """Checks what episodes need; returns a line of facts.

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
    """A line of facts about the environment at `rollout.environment.address`.

    Raises:
        EnvironmentLackError: what answers there is no environment, or speaks another version of the contract.
        ConfigError: it refuses the token, or the token's file cannot be read.
    """
    service = config.rollout.environment
    assert service is not None, "there is an address"
    # `paceline train` makes the run's own token when it starts: here any other stands for it.
    credentials = Credentials.from_env().with_token("check")
    options = RemoteEnvironmentOptions.of(service, turn_s=service.call_s, credentials=credentials)
    where = f"rollout.environment.address={service.address}"
    try:
        described = asyncio.run(_described(RemoteEnvironment(options)))
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
