"""Environments that attach to a rollout server: what they play is what a served one plays."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.cli.certificates import Authority
from paceline.core.errors import ConfigError
from paceline.core.samples.episode import Play, Played
from paceline.core.samples.trajectory import sampled_spans
from paceline.rollout.episodes.agents.endpoint import AgentEndpoint
from paceline.rollout.episodes.environment import EnvironmentLostError
from paceline.rollout.episodes.environments.attached import AttachedEnvironment, EnvironmentGatewayServicer
from paceline.rollout.episodes.environments.remote import RemoteEnvironment, RemoteEnvironmentOptions
from paceline.rollout.episodes.loop import Slot
from paceline.rollout.episodes.recorder import Draw
from paceline.rpc.v1 import environment_pb2_grpc
from paceline.sdk import Environment, EnvironmentAttachment, EnvironmentServer, Observation
from paceline.sdk.attached import playing
from paceline.service.grpc.server import start_server
from paceline.service.identity.credentials import Credentials, TlsFiles
from support.environments import Bad, Guess
from support.episodes import END, Script, call, episodes, group, ids, text

GAME = (
    call("guess", '{"digit": 5}'),
    "<tool_call>{</tool_call>",
    call("guess", '{"digit": 1}'),
    "I give up",
)
CREDENTIALS = Credentials(token="secret")
PLAY = Play(
    run_id="r",
    trajectory_id="train:1:7:0",
    attempt=5,
    task={"messages": [{"role": "user", "content": "Go."}]},
    task_seed=17,
    episode_seed=3,
    base_url="http://127.0.0.1:1/v1",
    token="t",
    model="policy",
)


@asynccontextmanager
async def server(
    name: str = "game", credentials: Credentials = CREDENTIALS
) -> AsyncIterator[tuple[AttachedEnvironment, AgentEndpoint, str]]:
    """The rollout server's side, and its address."""
    environment = AttachedEnvironment(name, run_id="r", play_s=60.0, wait_s=30.0, is_over=lambda: True)
    servicer, endpoint = EnvironmentGatewayServicer(), AgentEndpoint(host="127.0.0.1", tls=credentials.tls)
    servicer.environment = environment
    await endpoint.start()
    add = environment_pb2_grpc.add_EnvironmentGatewayServicer_to_server
    running = await start_server(add, servicer, host="127.0.0.1", port=0, credentials=credentials)
    try:
        yield environment, endpoint, running.address
    finally:
        await environment.close()
        await running.stop()
        await endpoint.close()


@asynccontextmanager
async def client(
    make: Callable[[], Environment], address: str, name: str = "game"
) -> AsyncIterator[asyncio.Task[None]]:
    attachment = EnvironmentAttachment(make, address=address, name=name, token="secret", patience_s=30.0)
    running = asyncio.create_task(attachment.run())
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.wait([running])


async def play(make: Callable[[], Environment], engine: Any, **changes: Any) -> Draw:
    async with asyncio.timeout(90), server() as (environment, endpoint, address), client(make, address):
        drawing = episodes(engine, environment, endpoint=endpoint, retries=0, **changes)
        [drawn] = await drawing.draw(group(), "0", Slot)
        return drawn


async def play_served(make: Callable[[], Environment], engine: Any) -> Draw:
    async with EnvironmentServer(make, token="secret") as listening:
        options = RemoteEnvironmentOptions(
            address=listening.address, call_s=30.0, lease_s=60.0, credentials=CREDENTIALS
        )
        remote = RemoteEnvironment(options)
        await remote.start()
        try:
            [drawn] = await episodes(engine, remote, retries=0).draw(group(), "0", Slot)
            return drawn
        finally:
            await remote.close()


async def test_an_episode_is_that_of_a_served_environment() -> None:
    served = await play_served(Guess, Script(*GAME))
    Guess.released.clear()
    drawn = await play(Guess, Script(*GAME))
    assert Guess.released == [2]
    assert text(drawn.prompt_token_ids) == text(served.prompt_token_ids)
    assert drawn.token_ids.tolist() == served.token_ids.tolist()
    assert drawn.mask.tolist() == served.mask.tolist()
    assert drawn.segment_starts == ()
    assert drawn.episode is not None
    assert served.episode is not None
    assert (drawn.episode.stop_reason, drawn.episode.reward) == ("answered", served.episode.reward)
    assert drawn.episode.components == served.episode.components
    assert drawn.episode.num_turns == served.episode.num_turns == 4


async def test_over_tls_an_episode_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Authority.create(tmp_path, days=1)
    for role, hosts in (("rollout", ["127.0.0.1"]), ("client", [])):
        Authority.load(tmp_path).issue(tmp_path / role, role, role=role, hosts=hosts, days=1.0)
    monkeypatch.setenv("PACELINE_TLS_DIR", str(tmp_path / "client"))
    credentials = Credentials(token="secret", tls=TlsFiles(tmp_path / "rollout"))
    async with asyncio.timeout(90), server(credentials=credentials) as (environment, endpoint, address):
        async with client(Guess, address):
            drawing = episodes(Script(*GAME), environment, endpoint=endpoint, retries=0)
            [drawn] = await drawing.draw(group(), "0", Slot)
            assert drawn.episode is not None
            assert drawn.episode.num_turns == 4
        with endpoint.open(1.0) as inbox:
            assert inbox.base_url.startswith("https://127.0.0.1:")
            headers = {"Authorization": f"Bearer {inbox.token}"}
            # A client of agents knows the authority; one that does not, or speaks plain text, gets nothing.
            knowing = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
            async with httpx.AsyncClient(verify=knowing, headers=headers) as http:
                assert (await http.get(f"{inbox.base_url}/models")).status_code == 200
            async with httpx.AsyncClient(headers=headers) as http:
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    await http.get(f"{inbox.base_url}/models")
                with pytest.raises(httpx.HTTPError):
                    await http.get(f"{inbox.base_url.replace('https', 'http')}/models")


async def test_a_limit_ends_the_episode_graded() -> None:
    drawn = await play(Guess, Script(call("guess", '{"digit": 5}')), max_turns=2)
    assert drawn.episode is not None
    assert drawn.episode.stop_reason == "max_turns"
    assert drawn.episode.components == {"turns": 2.0}
    assert drawn.episode.reward is not None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise in open", "KeyError"),
        ("unknown tool", "names the tool 'none'"),
        ("raise in step", "RuntimeError: broken"),
        ("silent", "returned nothing"),
        ("nan", "reward is nan"),
        ("text", "could not convert"),
    ],
)
async def test_an_environment_that_breaks_the_contract_loses_the_attempt(
    fault: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bad, "fault", fault)
    with pytest.raises(EnvironmentLostError, match=message):
        await play(Bad, Script("so"))


class Hanging(Guess):
    """Never answers a turn."""

    async def step(self, action: Any) -> Observation:
        await asyncio.Event().wait()
        return Observation()


async def test_a_client_that_goes_away_costs_an_attempt_and_its_tokens() -> None:
    async with asyncio.timeout(90), server() as (environment, endpoint, address):
        engine = Script("first", "second")
        drawing = asyncio.create_task(
            episodes(engine, environment, endpoint=endpoint, retries=2).draw(group(), "0", Slot)
        )
        async with client(Hanging, address) as hanging:
            while not engine.requests:  # noqa: ASYNC110 - the engine has no event for it
                await asyncio.sleep(0.01)
            hanging.cancel()
            await asyncio.wait([hanging])
        async with client(Guess, address):
            [drawn] = await drawing
        assert [drawn.token_ids[a:b].tolist() for a, b in sampled_spans(drawn.mask)] == [[*ids("first"), END]]
        assert len(engine.requests) == 2
        assert engine.requests[0].seed == engine.requests[1].seed


@pytest.mark.parametrize("code", ["invalid_api_key", "too_many_requests", "context_length_exceeded"])
async def test_a_refusal_that_ends_no_episode_is_an_error_and_none_of_its_ends(code: str) -> None:
    async def refuse(episode: Play, body: Mapping[str, object]) -> dict[str, Any]:
        return {"error": {"code": code, "message": "refused: why"}}

    Guess.released.clear()
    played = await playing.play(Guess(), PLAY, refuse)
    assert played == Played(error="RuntimeError: the rollout server refused: refused: why")
    assert len(Guess.released) == 1


async def test_nobody_attaches_in_time() -> None:
    environment = AttachedEnvironment("game", run_id="r", play_s=1.0, wait_s=0.2, is_over=lambda: False)
    endpoint = AgentEndpoint(host="127.0.0.1", tls=None)
    await endpoint.start()
    with pytest.raises(EnvironmentLostError, match="no client is attached"):
        await episodes(Script("so"), environment, endpoint=endpoint, retries=0).draw(group(), "0", Slot)
    await environment.close()
    await endpoint.close()


async def test_another_name_and_no_token_are_refused_and_the_end_of_the_run_ends_clients() -> None:
    async with asyncio.timeout(90), server() as (environment, _, address):
        async with client(Guess, address, "chess") as stranger:
            with pytest.raises(ConfigError, match="rollout.environment.attached is 'game'"):
                await stranger
        attachment = EnvironmentAttachment(Guess, address=address, name="game", token="x", patience_s=0.1)
        with pytest.raises(ConfigError, match="in PACELINE_ENVIRONMENT_TOKEN, one of"):
            await attachment.run()
        async with client(Guess, address) as running:
            while not environment.gateway.num_clients:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)
            await environment.close()
            await running
            assert running.exception() is None


class Agent(Environment):
    """Leads its episode itself."""

    async def open(self, task: Mapping[str, Any], *, task_seed: int, episode_seed: int) -> Observation:
        self.messages = list(task["messages"])
        return Observation()

    async def run(self, *, base_url: str, token: str, model: str) -> str:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {token}"}) as http:
            answer = await http.post(f"{base_url}/chat/completions", json={"messages": self.messages})
        return str(answer.json()["choices"][0]["message"]["content"])


async def test_an_agent_may_attach_too() -> None:
    drawn = await play(Agent, Script("enough"))
    assert drawn.episode is not None
    assert drawn.episode.stop_reason == "enough"
