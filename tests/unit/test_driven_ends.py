"""What an agent may still ask when its episode ends, is given up, or is run again by another caller."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from paceline.core.errors import PacelineError, ProtocolError
from paceline.rollout.engines.base import Sample
from paceline.rollout.episodes.agents.endpoint import AgentEndpoint, EpisodeInbox, PendingRequest
from paceline.sdk import Environment
from paceline.sdk.served.sessions import Sessions
from support.driving import play
from support.episodes import Script

ASK = {"role": "user", "content": "1+2?"}


async def test_a_token_opens_nothing_once_its_episode_is_over() -> None:
    endpoint = AgentEndpoint(host="127.0.0.1", tls=None)
    await endpoint.start()
    try:
        with endpoint.open(1.0) as inbox:
            headers = {"Authorization": f"Bearer {inbox.token}"}
            async with httpx.AsyncClient(base_url=inbox.base_url, headers=headers) as http:
                assert (await http.get("/models")).status_code == 200
                waiting = asyncio.create_task(http.post("/chat/completions", json={"messages": [ASK]}))
                assert await inbox.next() is not None
                inbox.close()
                refused = await http.post("/chat/completions", json={"messages": [ASK]})
                assert refused.json()["error"]["code"] == "episode_over"
                inbox.refuse_all()
                assert (await waiting).json()["error"]["code"] == "episode_over"
        async with httpx.AsyncClient(base_url=inbox.base_url, headers=headers) as http:
            assert (await http.get("/models")).status_code == 401
            assert (await http.post("/chat/completions", json={"messages": [ASK]})).status_code == 401
    finally:
        await endpoint.close()


class Held(Script):
    """An engine that answers once it is released."""

    def __init__(self, *lines: str | Exception) -> None:
        super().__init__(*lines)
        self.began, self.released, self.is_cancelled = asyncio.Event(), asyncio.Event(), False

    async def generate(self, *arguments: Any, **options: Any) -> list[Sample]:
        self.began.set()
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        return await super().generate(*arguments, **options)


class AskingAtOnce:
    """An agent that asks three questions at once; it returns when they have arrived, and at an event."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, returns_at: asyncio.Event) -> None:
        self.arrived, self._returns_at, count = asyncio.Event(), returns_at, 0
        self.answers: list[asyncio.Task[httpx.Response]] = []
        ask = EpisodeInbox.ask

        async def counted(inbox: EpisodeInbox, pending: PendingRequest) -> Any:
            nonlocal count
            count += 1
            if count == 3:
                self.arrived.set()
            return await ask(inbox, pending)

        monkeypatch.setattr(EpisodeInbox, "ask", counted)

    async def lead(self, task: Any, *, base_url: str, token: str, model: str) -> float:
        async def ask(number: int) -> httpx.Response:
            headers = {"Authorization": f"Bearer {token}"}
            async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=60.0) as http:
                body = {"messages": [{"role": "user", "content": f"{number}+2?"}]}
                return await http.post("/chat/completions", json=body)

        self.answers = [asyncio.create_task(ask(number)) for number in range(3)]
        await self.arrived.wait()
        await self._returns_at.wait()
        return 1.0

    async def codes(self) -> list[str]:
        """What became of the questions, sorted."""
        bodies = [answer.json() for answer in await asyncio.gather(*self.answers)]
        return sorted(body["error"]["code"] if "error" in body else "answered" for body in bodies)


async def test_questions_that_wait_when_their_agent_returns_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody reads the answers, so the policy is not trained on them; the one being given is a turn."""
    engine = Held("so")
    agent = AskingAtOnce(monkeypatch, returns_at=engine.began)
    close = EpisodeInbox.close

    def closed(inbox: EpisodeInbox) -> None:
        close(inbox)
        engine.released.set()

    monkeypatch.setattr(EpisodeInbox, "close", closed)
    [drawn] = await play(agent.lead, engine)
    assert await agent.codes() == ["answered", "episode_over", "episode_over"]
    assert len(engine.requests) == 1
    assert drawn.episode is not None
    assert (drawn.episode.num_turns, drawn.episode.stop_reason, drawn.episode.reward) == (1, "finished", 1.0)


@pytest.mark.parametrize("fails", [False, True], ids=["cancelled", "engine fails"])
async def test_questions_of_an_episode_that_is_given_up_are_all_refused(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    engine = Held(PacelineError("broken") if fails else "so")
    agent = AskingAtOnce(monkeypatch, returns_at=asyncio.Event())
    playing = asyncio.create_task(play(agent.lead, engine))
    async with asyncio.timeout(60):
        await engine.began.wait()
        await agent.arrived.wait()
    if fails:
        engine.released.set()
    else:
        playing.cancel()
    with pytest.raises(PacelineError if fails else asyncio.CancelledError):
        await playing
    assert await agent.codes() == ["episode_over"] * 3
    assert engine.is_cancelled == (not fails)
    assert len(engine.requests) == int(fails)


async def test_an_answer_is_given_again_after_the_end_and_no_other() -> None:
    """The client may have lost the answer that ended the episode."""
    seen: list[str] = []

    async def asking(task: Any, *, base_url: str, token: str, model: str) -> float:
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=60.0) as http:
            for content, retry in (("1+2?", "0"), ("1+2?", "1"), ("1+2?", "0"), ("2+2?", "1"), ("1+2?", "2")):
                body = {"messages": [{"role": "user", "content": content}]}
                answer = await http.post(
                    "/chat/completions", json=body, headers={"x-stainless-retry-count": retry}
                )
                value = answer.json()
                seen.append(value["error"]["code"] if "error" in value else value["id"])
        return 1.0

    engine = Script("so")
    [drawn] = await play(asking, engine, max_turns=1)
    assert seen == [seen[0], seen[0], "episode_over", "episode_over", seen[0]]
    assert seen[0].startswith("chatcmpl-")
    assert len(engine.requests) == 1
    assert drawn.episode is not None
    assert (drawn.episode.num_turns, drawn.episode.stop_reason, drawn.episode.reward) == (1, "max_turns", 1.0)


async def test_a_run_frees_its_episode_when_the_caller_goes_away_or_another_attempt_comes() -> None:
    ended: list[str] = []

    class Patient(Environment):
        async def run(self, *, base_url: str, token: str, model: str) -> str:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(token)
            return ""

        async def release(self) -> None:
            ended.append("released")

    sessions, key = Sessions(Patient, 4), ("r", "train:1:7:0")

    async def begin(attempt: int, token: str) -> asyncio.Task[str]:
        await sessions.open(key, attempt, {}, task_seed=0, episode_seed=0, lease_s=600.0)
        running = asyncio.create_task(sessions.run(key, attempt, base_url="", token=token, model=""))
        await asyncio.sleep(0.01)
        return running

    first = await begin(1, "first")
    first.cancel()
    await asyncio.wait([first])
    assert (ended, sessions.num_open) == (["first", "released"], 0)
    with pytest.raises(ProtocolError, match="attempt 1 was closed"):
        await begin(1, "again")
    second = await begin(2, "second")
    third = await begin(3, "third")
    await asyncio.wait([second], timeout=120)
    assert ended[2:] == ["second", "released"]
    assert sessions.num_open == 1
    third.cancel()
    await asyncio.wait([third])
    assert sessions.num_open == 0
