"""What `paceline check` and `paceline train` say of an environment before anything is created."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from paceline.checks import preflight_check, rollout_checks
from paceline.checks.preflight import parts
from paceline.checks.rollout_checks import environment_line
from paceline.core.errors import ConfigError, DataError, EnvironmentLackError
from paceline.core.samples.chat import ToolSpec
from paceline.rollout.episodes.environments.remote import RemoteEnvironment, RemoteEnvironmentOptions
from paceline.rollout.episodes.trial import made_up_arguments
from paceline.rpc.v1 import environment_pb2 as pb
from paceline.sdk import Environment, EnvironmentServer, RewardServer, agent
from paceline.sdk.served import environment_server
from paceline.service.identity.credentials import Credentials
from paceline.sizing.machine import free_port
from paceline.wire.calls.environment import ENVIRONMENT_CONTRACT
from support.chat_templates import QWEN2_5, SMOLLM2, tokenizer
from support.cli_configs import config
from support.environments import Bad
from support.environments import Guess as Game


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


ROWS = [{"prompt": [{"role": "user", "content": "Play."}], "ground_truth": "7", "data_source": "game"}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer whose template shows tools."""
    return saved(QWEN2_5, tmp_path / "model")


def saved(template: str, folder: Path) -> Path:
    tokenizer(template).save_pretrained(folder)
    return folder


async def episode_with(
    make: Any, model: Path, *, rows: Any = ROWS, files: Path | None = None, **sections: Any
) -> str:
    """What `paceline check` says of an episode with an environment, which has the rows unless files do."""
    check = {part.name: part.run for part in parts(here=True, tests=None)}["environment"]
    async with EnvironmentServer(make, tasks=None if files else lambda split: rows) as server:
        environment = {"address": server.address, "call_s": 5.0} | sections.pop("environment", {})
        tree = {
            "data": {"train_files": [str(files)] if files else [], "max_prompt_length": 2000},
            "model": {"path": str(model)},
            "reward": {"functions": []},
            "rollout": {"environment": environment, "episode": {"max_turns": 20}},
        }
        return await asyncio.to_thread(check, config(**tree | sections))


async def test_one_episode_is_played_with_each_tool_and_the_ground_truth(model: Path, tmp_path: Path) -> None:
    Game.released.clear()
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROWS[0]))
    for files in (None, file):
        said = await episode_with(Game, model, files=files)
        assert said.endswith(
            "\n      an episode: one, played by a script: 4 turn(s), 3 call(s), ended by answered; "
            "reward 0 (turns 1); it said to the first turn: too low"
        )
    assert Game.released == [1, 1]


class Endless(Environment):
    """Says the turn's number, and no more than that."""

    async def step(self, action: Any) -> Any:
        from paceline.sdk import Observation

        return Observation(text=f"{action.content}!")


async def test_an_episode_without_an_end_or_a_reward(model: Path) -> None:
    with pytest.raises(EnvironmentLackError, match=r"without a reward, .* needs rollout.environment.drives"):
        await episode_with(Endless, model)
    said = await episode_with(Endless, model, reward={"functions": [{"name": "exact_match"}]})
    assert "8 turn(s), 0 call(s), ended by max_turns; no reward of its own; it said" in said
    assert said.endswith(" 7!")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise in open", "Open of .*word.* mend its `open`"),
        ("raise in step", "Step of .*broken"),
        ("silent", "turn 1 with nothing"),
        ("nan", "Close of .*nan"),
    ],
)
async def test_an_environment_with_a_fault_is_named_with_it(
    fault: str, said: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bad, "fault", fault)
    with pytest.raises(EnvironmentLackError, match=f"did not play one episode to its end: .*{said}"):
        await episode_with(Bad, model)


async def test_tools_that_the_template_does_not_show_are_a_fault_only_where_there_are_some(
    tmp_path: Path,
) -> None:
    model = saved(SMOLLM2, tmp_path)
    scored = {"reward": {"functions": [{"name": "exact_match"}]}}
    assert "max_turns" in await episode_with(Endless, model, **scored)
    with pytest.raises(ConfigError, match=r"cannot begin: .* rollout.episode.show_tools: false"):
        await episode_with(Game, model)


def ask(task: Any, *, base_url: str, token: str, model: str) -> float:
    body = json.dumps({"model": model, "messages": task["messages"]}).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as got:
        said = json.loads(got.read())["choices"][0]["message"]["content"]
    return float(said == task["ground_truth"])


async def test_an_agent_leads_its_episode(model: Path) -> None:
    said = await episode_with(agent(ask), model, environment={"drives": True})
    assert said.endswith("1 turn(s), 0 call(s), ended by finished; reward 1")
    with pytest.raises(EnvironmentLackError, match=r"serve an agent there, or leave .*drives out"):
        await episode_with(Game, model, environment={"drives": True})


async def test_an_environment_without_rows_or_with_a_prompt_that_grows_too_long(model: Path) -> None:
    with pytest.raises(DataError, match="has no rows for training"):
        await episode_with(Game, model, rows=[])
    data = {"train_files": [], "max_prompt_length": 60}
    with pytest.raises(ConfigError, match=r"cannot begin: .* data.max_prompt_length=60"):
        await episode_with(Game, model, data=data)


def test_arguments_are_made_up_by_the_schema() -> None:
    properties = {
        "a": {"type": "integer"},
        "b": {"enum": ["x", "y"]},
        "c": {"type": "string", "default": "d"},
        "e": {},
        "f": {"type": "array"},
        "left": {"type": "integer"},
    }
    tool = ToolSpec(
        name="t", description="", parameters={"properties": properties, "required": ["a", "b", "c", "e", "f"]}
    )
    assert made_up_arguments(tool) == {"a": 1, "b": "x", "c": "d", "e": "1", "f": []}
