"""Rollout servers, reward services and the environment are killed during episodes of 1 to 8 turns.

The environment is a process, which gets SIGKILL; members are killed as in `support.killed_fleet`, and their
episodes with them: nothing of them reaches the environment from then on. PACELINE_TEST_KILLS asks for a
campaign of so many kills.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.controller.batch.barrier import Verdict
from paceline.core.samples.trajectory import FinishReason
from paceline.reward.environment import EnvironmentReward
from paceline.rollout.engines.base import Sample, SampleRequest
from paceline.rollout.episodes.agents.endpoint import AgentEndpoint
from paceline.rollout.episodes.environment import EnvironmentLostError, EpisodeEnvironment, EpisodeTask
from paceline.rollout.episodes.environments.attached import AttachedEnvironment, EnvironmentGatewayServicer
from paceline.rollout.episodes.environments.remote import (
    RemoteEnvironment,
    RemoteEnvironmentOptions,
    RemoteSession,
)
from paceline.rpc.v1 import environment_pb2 as pb
from paceline.rpc.v1 import environment_pb2_grpc
from paceline.service.grpc import channels
from paceline.service.grpc.server import start_server
from paceline.service.identity.credentials import Credentials
from paceline.sizing.machine import free_port
from support import killed_fleet
from support.episodes import END, TOKENIZER, episodes, ids
from support.fake_engine import FakeEngine
from support.killed_fleet import NUM_SAMPLES, PROMPTS, MortalBroker, collect, config, content

NUM_KILLS = int(os.environ.get("PACELINE_TEST_KILLS", "40"))
CREDENTIALS = Credentials(token="secret")
LEASE_S = 3.0
WORDS = ("the", "other", "12", "and", "so")


class Speaker(FakeEngine):
    """Says a few words that follow from seed and context, and ends each turn."""

    def __init__(self) -> None:
        super().__init__(vocab_size=len(TOKENIZER), token_s=0.0005)

    def sample(self, request: SampleRequest) -> Sample:
        rng = np.random.default_rng([request.seed, *request.prompt_token_ids])
        tokens = [*ids(" ".join(rng.choice(WORDS, size=int(rng.integers(1, 5))))), END]
        return Sample(
            token_ids=np.array(tokens, np.int32),
            log_probs=np.full(len(tokens), -0.5, np.float32),
            finish_reason=FinishReason.STOP,
        )


@dataclass
class EnvironmentProcess:
    """The environment; killed `num_deaths` times, and started again."""

    arguments: tuple[str, ...]
    rng: np.random.Generator
    num_deaths: int
    num_killed: int = 0
    events: list[str] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            command = (sys.executable, "-m", "support.rounds", *self.arguments)
            path = os.pathsep.join(entry for entry in sys.path if entry)
            process = await asyncio.create_subprocess_exec(*command, env={**os.environ, "PYTHONPATH": path})
            try:
                if self.is_served:
                    await self._until_up()
                alive_s = None
                if self.num_killed < self.num_deaths:
                    alive_s = float(self.rng.uniform(0.02, 0.3)) + (0.0 if self.is_served else 1.0)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), alive_s)
                assert process.returncode is None, f"the environment ended by itself: {process.returncode}"
                process.send_signal(signal.SIGKILL)
                self.num_killed += 1
                await process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    @property
    def is_served(self) -> bool:
        return self.arguments[0] != "attach"

    async def until_up(self) -> None:
        """Returns when it listens; one that attaches comes when it comes."""
        if self.is_served:
            await self._until_up()

    async def _until_up(self) -> None:
        for _ in range(600):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", int(self.arguments[0]))
                writer.close()
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the environment does not come up")

    async def num_open(self) -> int:
        """Episodes that it has open; one that attaches has them for as long as its requests are answered."""
        if not self.is_served:
            return 0
        channel = channels.connect(
            f"127.0.0.1:{self.arguments[0]}", credentials=CREDENTIALS, role="environment"
        )
        try:
            stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
            answer = await stub.Describe(pb.DescribeEnvironmentRequest(), timeout=60, wait_for_ready=True)
            return int(answer.num_open)
        finally:
            await channel.close()


class MortalSession(RemoteSession):
    """Dies with its member: a killed process says no goodbye."""

    dead: asyncio.Event

    async def abandon(self) -> None:
        if not self.dead.is_set():
            await super().abandon()

    async def _call(self, method: Any, request: Any) -> Any:
        if self.dead.is_set():
            raise EnvironmentLostError("this member was killed", peer="environment")
        return await super()._call(method, request)


class MortalEnvironment(RemoteEnvironment):
    def __init__(self, options: RemoteEnvironmentOptions, dead: asyncio.Event) -> None:
        super().__init__(options)
        self._dead = dead

    def session(self, task: EpisodeTask) -> RemoteSession:
        session = super().session(task)
        session.__class__, session.dead = MortalSession, self._dead  # type: ignore[attr-defined]
        return session


async def roll_out(broker: MortalBroker, name: str, *, mode: str, ports: Mapping[str, int]) -> None:
    """A rollout process whose samples are episodes."""
    async with contextlib.AsyncExitStack() as stack:
        environment: EpisodeEnvironment
        if mode == "attach":
            environment = await _attached(stack, ports[name.partition("/")[0]])
        else:
            options = RemoteEnvironmentOptions(
                address=f"127.0.0.1:{ports['environment']}",
                call_s=5.0,
                lease_s=LEASE_S,
                credentials=CREDENTIALS,
                run_s=20.0,
            )
            environment = MortalEnvironment(options, broker.dead)
            stack.push_async_callback(environment.close)
        await environment.start()
        endpoint = None
        if mode != "step":
            endpoint = AgentEndpoint(host="127.0.0.1", tls=None)
            stack.push_async_callback(endpoint.close)
            await endpoint.start()
        engine = Speaker()
        drawn = episodes(engine, environment, retries=50, endpoint=endpoint)
        await killed_fleet.roll_out(broker, name, engine, drawn)


async def _attached(stack: contextlib.AsyncExitStack, port: int) -> EpisodeEnvironment:
    environment = AttachedEnvironment("rounds", run_id="r", play_s=20.0, wait_s=20.0, is_over=lambda: False)
    servicer = EnvironmentGatewayServicer()
    servicer.environment = environment
    add = environment_pb2_grpc.add_EnvironmentGatewayServicer_to_server
    running = await start_server(add, servicer, host="127.0.0.1", port=port, credentials=CREDENTIALS)
    stack.push_async_callback(running.stop, 0.0)
    return environment


async def reward(broker: MortalBroker, name: str) -> None:
    await killed_fleet.reward(broker, name, EnvironmentReward(1.0))


@contextlib.asynccontextmanager
async def environment(
    rng: np.random.Generator, num_deaths: int, mode: str, ports: Mapping[str, int]
) -> AsyncIterator[EnvironmentProcess]:
    arguments = [str(ports["environment"]), *(["drive"] if mode == "drive" else [])]
    if mode == "attach":
        arguments = ["attach", *(f"127.0.0.1:{ports[slot]}" for slot in ("rollout-0", "rollout-1"))]
    process = EnvironmentProcess(tuple(arguments), rng, num_deaths)
    running = asyncio.create_task(process.run())
    try:
        await process.until_up()
        yield process
    finally:
        running.cancel()
        [end] = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(end, asyncio.CancelledError), end


def run_config() -> RunConfig:
    plain = config().model_dump(mode="json")
    plain["rollout"]["environment"] = {"address": "127.0.0.1:1"}
    plain["barrier"] |= {"stall_timeout_s": 250.0, "collect_timeout_s": 300.0}
    return parse(RunConfig, plain)


async def play(folder: Path, *, seed: int, num_deaths: int, mode: str) -> tuple[list[Any], Any, int]:
    """The rows of a step, its batch, and how many were killed."""
    ports = {name: free_port() for name in ("environment", "rollout-0", "rollout-1")}
    async with environment(np.random.default_rng(seed), num_deaths, mode, ports) as process:
        works = functools.partial(roll_out, mode=mode, ports=ports), reward
        batch, broker, fleet = await collect(
            folder, seed=seed, num_deaths=num_deaths, works=works, run_config=run_config()
        )
        rows = await content(batch, broker)
        killed = len(fleet.deaths) + process.num_killed
        for _ in range(1200):
            if not await process.num_open():
                break
            await asyncio.sleep(0.1)
        assert await process.num_open() == 0, "an episode was left open"
    return rows, batch, killed


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["step", "drive", "attach"])
async def test_no_episode_is_trained_twice_or_lost(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(killed_fleet, "LEASE_S", 0.5)
    # An environment that takes long to come back is no fault of the groups that wait for it.
    monkeypatch.setattr(killed_fleet, "LIMITS", replace(killed_fleet.LIMITS, group_timeout_s=60.0))
    messages = ({"role": "user", "content": "Go."},)
    for prompt in PROMPTS.values():
        monkeypatch.setitem(PROMPTS, prompt.prompt_id, replace(prompt, messages=messages))
    killed = 0
    for seed in range(1000):
        for name in ("calm", "wild"):
            (tmp_path / f"{name}{seed}").mkdir()
        calm, _, _ = await play(tmp_path / f"calm{seed}", seed=seed, num_deaths=0, mode=mode)
        wild, batch, num_killed = await play(tmp_path / f"wild{seed}", seed=seed, num_deaths=3, mode=mode)
        killed += num_killed
        assert wild == calm
        assert len({row[0] for row in wild}) == len(wild) == len(PROMPTS) * NUM_SAMPLES
        assert set(batch.verdicts) <= {Verdict.ADMITTED, Verdict.DUPLICATE}
        with (tmp_path / f"wild{seed}/events.jsonl").open() as lines:
            admitted = [e["id"] for e in map(json.loads, lines) if e.get("verdict") == "admitted"]
        assert len(admitted) == len(set(admitted)) == len(wild)
        rounds = {header.episode.num_turns for header in batch.samples}
        assert len(rounds) > 3, "episodes of different lengths"
        if killed >= NUM_KILLS // 3:
            print(f"{killed} kills in {seed + 1} steps of {len(wild)} episodes")
            return
