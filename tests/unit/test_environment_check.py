"""What `paceline check` and `paceline train` say of an environment before anything is created."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from paceline.checks import preflight_check, rollout_checks
from paceline.checks.rollout_checks import environment_line
from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.rollout.episodes.environments.remote import RemoteEnvironment, RemoteEnvironmentOptions
from paceline.rpc.v1 import environment_pb2 as pb
from paceline.sdk import Environment, EnvironmentServer, RewardServer
from paceline.sdk.served import environment_server
from paceline.service.identity.credentials import Credentials
from paceline.sizing.machine import free_port
from paceline.wire.calls.environment import ENVIRONMENT_CONTRACT
from support.cli_configs import config


class Guess(Environment):
    """Says nothing: nobody plays here."""


async def said_of(**environment: Any) -> str:
    """What the check says, which has an event loop of its own."""
    return await asyncio.to_thread(environment_line, config(rollout={"environment": environment}))


@asynccontextmanager
async def served(monkeypatch: pytest.MonkeyPatch, **described: Any) -> AsyncIterator[str]:
    """The address of an environment that describes itself so."""

    async def describe(self: Any, request: Any, context: Any) -> pb.EnvironmentDescription:
        return pb.EnvironmentDescription(name="Guess", max_episodes=3, **described)

    monkeypatch.setattr(environment_server._Servicer, "Describe", describe)
    async with EnvironmentServer(Guess) as server:
        yield server.address


def test_runs_without_an_environment_and_with_one_that_attaches_ask_nobody() -> None:
    assert environment_line(config()) == "none"
    attached = config(rollout={"environment": {"attached": "game"}}, service={"rollout_port": 7200})
    assert environment_line(attached) == "game, which attaches to the rollout servers of the run"


async def test_an_environment_that_is_served_says_its_name() -> None:
    async with EnvironmentServer(Guess, max_episodes=5) as server:
        assert await said_of(address=server.address) == f"Guess at {server.address}, up to 5 episodes"


async def test_a_served_environment_says_which_contract_it_speaks() -> None:
    async with EnvironmentServer(Guess) as server:
        credentials = Credentials(token="any")
        options = RemoteEnvironmentOptions(
            address=server.address, call_s=5.0, lease_s=5.0, credentials=credentials
        )
        environment = RemoteEnvironment(options)
        try:
            assert (await environment.describe()).contract == ENVIRONMENT_CONTRACT == 1
        finally:
            await environment.close()


async def test_a_token_that_is_refused_is_the_files_to_name(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    async with EnvironmentServer(Guess, token="secret") as server:
        with pytest.raises(ConfigError, match="refused the token .* rollout.environment.token_file names"):
            await said_of(address=server.address)
        named = await said_of(address=server.address, token_file=str(tmp_path / "token"))
        assert named.startswith("Guess at ")


async def test_an_environment_that_starts_beside_the_run_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(rollout_checks, "_PATIENCE_S", 60.0)
    monkeypatch.setattr(
        preflight_check.time,
        "sleep",
        lambda seconds: (loop.call_soon_threadsafe(refused.set), sleep(seconds)),
    )
    port = free_port()
    asking = asyncio.create_task(said_of(address=f"127.0.0.1:{port}"))
    await refused.wait()
    async with EnvironmentServer(Guess, port=port):
        assert (await asking).startswith("Guess at ")


@pytest.mark.parametrize("contract", [0, 1])
async def test_an_environment_of_this_contract_is_taken(
    monkeypatch: pytest.MonkeyPatch, contract: int
) -> None:
    async with served(monkeypatch, contract=contract) as address:
        assert await said_of(address=address) == f"Guess at {address}, up to 3 episodes"


async def test_an_environment_of_a_later_contract_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch, contract=2) as address:
        with pytest.raises(
            EnvironmentLackError, match=r"speaks version 2 .* this Paceline version 1: upgrade"
        ):
            await said_of(address=address)


async def test_another_service_at_the_address_is_no_environment() -> None:
    async with RewardServer(lambda response, truth: 1.0) as server:
        with pytest.raises(EnvironmentLackError, match=r"is no environment .* start one there"):
            await said_of(address=server.address)


async def test_something_that_listens_and_says_nothing_is_no_environment() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        with pytest.raises(EnvironmentLackError, match=r"is no environment .* start one there"):
            await said_of(address=f"{host}:{port}")
