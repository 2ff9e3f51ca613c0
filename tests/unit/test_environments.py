"""Environments that users serve: attempts, stored answers, leases, and everything going wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config.rollout import EnvironmentConfig
from paceline.core.errors import ConfigError, ProtocolError
from paceline.core.samples.chat import Message, ToolCall
from paceline.rollout.episodes.environment import EnvironmentLostError, EpisodeTask
from paceline.rollout.episodes.environments.remote import RemoteEnvironment, RemoteEnvironmentOptions
from paceline.sdk import Environment, EnvironmentServer, Observation, tool
from paceline.sdk.served.sessions import Sessions
from paceline.service.identity.credentials import Credentials
from support.clocks import ManualClock
from support.environments import Bad, Guess
from support.episodes import Script, call, episodes, group, patient_abandonment, text

TASK = EpisodeTask(
    run_id="r", trajectory_id="train:1:7:0", attempt=5, task={"level": 2}, task_seed=17, episode_seed=3
)
KEY = ("r", "train:1:7:0")


@asynccontextmanager
async def served(
    make: Any = Guess, *, call_s: float = 30.0, **options: Any
) -> AsyncIterator[tuple[RemoteEnvironment, EnvironmentServer]]:
    async with EnvironmentServer(make, token="secret", **options) as server, patient_abandonment():
        remote = RemoteEnvironment(
            RemoteEnvironmentOptions(
                address=server.address, call_s=call_s, lease_s=30.0, credentials=Credentials(token="secret")
            )
        )
        await remote.start()
        try:
            yield remote, server
        finally:
            await remote.close()


def action(name: str = "guess", **arguments: object) -> Message:
    return Message(
        role="assistant",
        content="I think",
        tool_calls=(ToolCall(call_id="c", name=name, arguments=arguments),),
    )


async def test_a_game_over_the_wire() -> None:
    async with served() as (remote, server):
        session = remote.session(TASK)
        opening = await session.open()
        assert opening.messages == (Message(role="user", content="Guess a digit."),)
        assert {tool.name for tool in opening.tools} == {"guess", "ponder", "stumble"}
        guess = next(tool for tool in opening.tools if tool.name == "guess")
        assert guess.parameters["properties"] == {"digit": {"type": "integer"}}
        low = await session.step(1, action(digit=3))
        assert low.messages == (Message(role="tool", content="too low", name="guess", call_id="c"),)
        assert low.stop_reason == ""
        won = await session.step(2, action(digit=7))
        assert (won.messages[0].content, won.stop_reason) == ("right", "won")
        grade = await session.close("won")
        assert (grade.reward, grade.components) == (1.0, {"turns": 2.0})
        assert server.sessions.num_open == 0


async def test_what_the_policy_does_wrong_is_answered() -> None:
    async with served() as (remote, _):
        session = remote.session(TASK)
        await session.open()
        bad = ToolCall(call_id="c", name="guess", arguments={}, problem="it is not JSON")
        said = [
            await session.step(1, Message(role="assistant", content="x\ud800", tool_calls=(bad,))),
            await session.step(2, action("fly")),
            await session.step(3, action(number=3)),
            await session.step(4, action("ponder")),
            await session.step(5, action("stumble")),
            await session.step(6, action(digit=float("nan"))),
        ]
        assert [observation.messages[0].content for observation in said[:5]] == [
            "error: it is not JSON",
            "error: there is no tool 'fly'; there are guess, ponder, stumble",
            "error: guess has no argument 'number'; it has digit",
            "error: ponder did not answer within 0.3 s",
            "error: ValueError: no such thing",
        ]
        assert "nan among the values" in said[5].messages[0].content
        assert all(observation.stop_reason == "" for observation in said)


async def test_a_repeated_call_gets_the_first_answer() -> None:
    async with served() as (remote, _):
        session = remote.session(TASK)
        first = await session.open()
        assert await session.open() == first
        answer = await session.step(1, action(digit=7))
        again = await session.step(1, action(digit=1))
        assert (again.messages, again.stop_reason) == (answer.messages, "won")
        grade = await session.close("won")
        assert await session.close("won") == grade
        assert grade.components == {"turns": 1.0}


async def test_a_higher_attempt_closes_a_lower_one() -> None:
    Guess.released.clear()
    async with served() as (remote, server):
        old, new = remote.session(TASK), remote.session(replace(TASK, attempt=9))
        await old.open()
        await old.step(1, action(digit=1))
        await new.open()
        assert Guess.released == [1]
        for refused in (old.step(2, action(digit=1)), old.open(), old.close("won")):
            with pytest.raises(EnvironmentLostError, match="is over"):
                await refused
        assert (await new.step(1, action(digit=7))).stop_reason == "won"
        await old.abandon()
        assert server.sessions.num_open == 1, "a late abandonment frees no attempt but its own"
        await new.close("won")
        with pytest.raises(EnvironmentLostError, match="attempt 9 was closed"):
            await remote.session(replace(TASK, attempt=7)).open()


@pytest.mark.parametrize(("turn", "answered"), [(2, 0), (0, 0), (3, 1)])
async def test_a_wrong_turn_is_refused(turn: int, answered: int) -> None:
    async with served() as (remote, _):
        session = remote.session(TASK)
        await session.open()
        if answered:
            await session.step(1, action(digit=1))
        with pytest.raises(EnvironmentLostError, match=f"{answered} turns were answered"):
            await session.step(turn, action(digit=1))


async def test_no_room_and_no_token_are_refused() -> None:
    async with served(max_episodes=1) as (remote, server):
        await remote.session(TASK).open()
        with pytest.raises(EnvironmentLostError, match="max_episodes"):
            await remote.session(replace(TASK, trajectory_id="train:1:8:0")).open()
        stranger = RemoteEnvironment(
            RemoteEnvironmentOptions(
                address=server.address, call_s=60.0, lease_s=60.0, credentials=Credentials(token="x")
            )
        )
        await stranger.start()
        with pytest.raises(EnvironmentLostError, match="refused the token"):
            await stranger.session(TASK).open()
        await stranger.close()


async def test_a_session_that_nobody_closes_ends_with_its_lease() -> None:
    Guess.released.clear()
    clock = ManualClock()
    sessions = Sessions(Guess, 4, clock)
    await sessions.open(KEY, 1, {}, task_seed=17, episode_seed=0, lease_s=30.0)
    clock.advance(29.0)
    assert await sessions.expire() == 0
    await sessions.step(KEY, 1, 1, action(digit=1))
    clock.advance(29.0)
    assert await sessions.expire() == 0
    clock.advance(2.0)
    assert await sessions.expire() == 1
    assert (sessions.num_open, Guess.released) == (0, [1])
    with pytest.raises(ProtocolError, match="its lease ran out"):
        await sessions.step(KEY, 1, 2, action(digit=1))


async def test_no_lease_ends_while_a_call_is_under_way() -> None:
    clock, may_answer = ManualClock(), asyncio.Event()

    class Slow(Guess):
        async def step(self, action: Message) -> Observation:
            await may_answer.wait()
            return await super().step(action)

    sessions = Sessions(Slow, 1, clock)
    await sessions.open(KEY, 1, {}, task_seed=7, episode_seed=0, lease_s=30.0)
    stepping = asyncio.create_task(sessions.step(KEY, 1, 1, action(digit=1)))
    await asyncio.sleep(0)  # it has begun
    clock.advance(1000.0)
    assert (await sessions.expire(), sessions.num_open) == (0, 1)
    may_answer.set()
    assert (await stepping).messages[0].content == "too low"
    assert (await sessions.expire(), sessions.num_open) == (0, 1), "the lease begins anew with the answer"
    clock.advance(31.0)
    assert (await sessions.expire(), sessions.num_open) == (1, 0)


async def test_episodes_with_a_served_environment() -> None:
    async with served() as (remote, server):
        engine = Script(call("guess", '{"digit": 0}'), call("guess", '{"digit": 1}'), "I give up")
        [drawn] = await episodes(engine, remote).draw(group(), "0", _Slots)
        assert drawn.episode is not None
        assert drawn.episode.num_tool_calls >= 1
        assert drawn.episode.stop_reason in ("won", "answered")
        assert drawn.episode.reward is not None
        assert "Guess a digit." in text(drawn.prompt_token_ids)
        assert server.sessions.num_open == 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise in open", "KeyError"),
        ("unknown tool", "names the tool 'none'"),
        ("raise in step", "RuntimeError"),
        ("hang in step", "within 3 s"),
        ("silent", "answered turn 1 with nothing"),
        ("wrong role", "role 'ghost'"),
        ("nan", "reward is nan"),
        ("text", "must return an Outcome of numbers"),
    ],
)
async def test_an_environment_that_breaks_the_contract_loses_the_attempt_and_holds_nothing(
    fault: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bad, "fault", fault)
    async with served(Bad, call_s=3.0 if "hang" in fault else 30.0) as (remote, server):
        with pytest.raises(EnvironmentLostError, match=message):
            await episodes(Script("so"), remote, retries=0).draw(group(), "0", _Slots)
        assert server.sessions.num_open == 0


async def test_a_server_that_restarts_costs_one_attempt() -> None:
    async with served() as (remote, server):
        session = remote.session(TASK)
        await session.open()
        await server.sessions.close_all()
        with pytest.raises(EnvironmentLostError, match="over|not open"):
            await session.step(1, action(digit=1))
        again = remote.session(replace(TASK, attempt=TASK.attempt + 1))
        assert (await again.open()).messages


async def test_a_server_that_is_gone() -> None:
    async with served(call_s=3.0) as (remote, server):
        session = remote.session(TASK)
        await session.open()
        await server.stop()
        with pytest.raises(EnvironmentLostError, match="PeerLostError|DeadlineError"):
            await session.step(1, action(digit=1))
        await session.abandon()


async def test_cancelled_episodes_leave_no_session() -> None:
    async with served() as (remote, server):
        drawing = asyncio.create_task(
            episodes(Script(call("ponder")), remote).draw(group(samples=3), "0", _Slots)
        )
        await until(lambda: server.sessions.num_open == 3)
        drawing.cancel()
        await asyncio.wait([drawing])
        await until(lambda: server.sessions.num_open == 0)


def test_a_tool_without_a_docstring_is_refused() -> None:
    with pytest.raises(ConfigError, match="no docstring"):

        class Mute(Environment):
            @tool()
            async def act(self) -> str:
                return ""


def test_the_token_file_must_be_readable(tmp_path: Path) -> None:
    config = EnvironmentConfig(address="127.0.0.1:1", token_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="token_file"):
        RemoteEnvironmentOptions.of(config, turn_s=10.0, credentials=Credentials())
    (tmp_path / "token").write_text("t\n")
    config = EnvironmentConfig(address="127.0.0.1:1", token_file=str(tmp_path / "token"))
    options = RemoteEnvironmentOptions.of(config, turn_s=10.0, credentials=Credentials())
    assert (options.credentials.token, options.lease_s) == ("t", 130.0)


def _Slots() -> Any:
    from paceline.rollout.episodes.loop import Slot

    return Slot()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within a minute")
