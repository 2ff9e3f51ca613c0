"""What clients that attach may not do, and what it costs: an item at most."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from paceline.core.attached_clients.attachment import (
    MAX_WINDOW,
    Answers,
    Hello,
    Window,
)
from paceline.core.errors import (
    ConfigError,
    InvalidMessageError,
    PacelineError,
    ProtocolError,
)
from paceline.core.scoring import MAX_ITEMS_PER_CALL, ScoreItem, ScoreResult
from paceline.sdk import RewardAttachment
from support.attached_scorers import RawClient, answer, ended, items, length, run

FLOOD = 100


async def _twice(client: RawClient, tasks: list[tuple[int, ScoreItem]]) -> None:
    for _ in range(FLOOD):
        client.say(Answers(tuple(answer(*task) for task in tasks)))


async def _others(client: RawClient, tasks: list[tuple[int, ScoreItem]]) -> None:
    client.say(Answers(tuple(answer(ticket + 1 + n, item) for ticket, item in tasks for n in range(FLOOD))))


async def _flood(client: RawClient, tasks: list[tuple[int, ScoreItem]]) -> None:
    for _ in range(2000):
        client.say(Window(window=1))


async def _hello_again(client: RawClient, tasks: list[tuple[int, ScoreItem]]) -> None:
    client.say(Hello(name="judge", client="raw", window=1))


async def _nonsense(client: RawClient, tasks: list[tuple[int, ScoreItem]]) -> None:
    client.say(Window(window=0))


async def _many_answers(client: RawClient, tasks: list[tuple[int, ScoreItem]]) -> None:
    client.say(Answers(tuple(answer(*task) for task in tasks for _ in range(MAX_WINDOW + 1))))


async def _many_results(client: RawClient, tasks: list[tuple[int, ScoreItem]]) -> None:
    result = ScoreResult(trajectory_id="t0", reward=1.0)
    client.say(Answers(((tasks[0][0], (result,) * (MAX_ITEMS_PER_CALL + 1)),)))


@pytest.mark.parametrize(
    "misbehave", [_twice, _others, _flood, _hello_again, _nonsense, _many_answers, _many_results]
)
async def test_a_client_that_breaks_the_contract_is_sent_away_and_harms_no_item(
    misbehave: Callable[..., Any],
) -> None:
    async with run() as service:
        client = service.attach()
        bad = RawClient(service.address)
        await bad.hello(window=1)
        await service.clients(2)
        scoring = asyncio.create_task(service.scorer.score(items(*["a"] * 20)))
        tasks = await bad.work()
        await misbehave(bad, tasks)
        with pytest.raises(PacelineError):
            while True:
                await bad.next()
        await service.clients(1)
        scores = await scoring
        own = 7.0 if misbehave is _twice else 1.0
        assert [score.reward for score in scores].count(own) >= 1
        assert {score.reward for score in scores} <= {1.0, own}
        await ended(client)
        await bad.close()


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (ScoreResult(trajectory_id="t0", reward=math.nan), "not_finite"),
        (ScoreResult(trajectory_id="t0", reward=1.0, components={"c": math.inf}), "not_finite"),
        (ScoreResult(trajectory_id="another", reward=1.0), "wrong_count"),
        (ScoreResult(trajectory_id="t0", reward=None, error="timeout: slow"), "timeout"),
        (
            ScoreResult(trajectory_id="t0", reward=1.0, components={str(n): 0.0 for n in range(9999)}),
            "wrong_type",
        ),
    ],
)
async def test_a_bad_answer_is_its_items_error(result: ScoreResult, kind: str) -> None:
    async with run() as service:
        client = RawClient(service.address)
        await client.hello()
        scoring = asyncio.create_task(service.scorer.score(items("a", "b")))
        (first, _), (second, item) = await client.work()
        client.say(Answers(((first, result), answer(second, item))))
        scores = await scoring
        assert scores[0].error is not None
        assert scores[0].error[0].value == kind
        assert scores[1].reward == 7.0
        await client.close()


async def test_an_item_that_no_message_can_hold_is_its_own_error() -> None:
    async with run() as service:
        client = service.attach()
        scores = await service.scorer.score(items("\ud800", "bb"))
        assert [score.error_kind and score.error_kind.value for score in scores] == ["wrong_type", None]
        await ended(client)


async def test_who_may_attach() -> None:
    async with run(token="secret") as service:
        for name, token, words in (
            (
                "judge",
                "wrong",
                r"refused the token \(wrong[^)]*scope\); give .* in PACELINE_REWARD_TOKEN, one of",
            ),
            ("other", "secret", "no client can attach as 'other' to this run: reward.attached names judge"),
        ):
            attachment = RewardAttachment(length, address=service.address, name=name, token=token)
            with pytest.raises(ConfigError, match=words):
                await attachment.run()
        old = RawClient(service.address, token="secret")
        old.say(Hello(name="judge", client="old", window=1, contract=9))
        with pytest.raises(ProtocolError, match="speaks version 9"):
            await old.next()
        await old.close()
        shy = RawClient(service.address, token="secret")
        shy.say(Window(window=2))
        with pytest.raises(ProtocolError, match="says hello in its first message"):
            await shy.next()
        await shy.close()
        wide = RawClient(service.address, token="secret")
        wide.say(Hello(name="judge", client="wide", window=10**6))
        with pytest.raises(InvalidMessageError, match="window is 1000000, write 1 to 4096"):
            await wide.next()
        await wide.close()


async def test_a_message_has_tasks_up_to_a_size() -> None:
    """Long responses in one message would be more than a client takes."""
    async with run() as service:
        client = RawClient(service.address)
        await client.hello()
        scoring = asyncio.create_task(
            service.scorer.score(items("x" * 3 * 2**20, "y" * 3 * 2**20, "z", "zz"))
        )
        counts = []
        while sum(counts) < 4:
            tasks = await client.work()
            counts.append(len(tasks))
            client.say(Answers(tuple(answer(*task) for task in tasks)))
        assert counts == [1, 3]
        assert all(score.error is None for score in await scoring)
        await client.close()
