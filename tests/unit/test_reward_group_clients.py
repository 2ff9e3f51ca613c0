"""Attached clients that score the samples of a prompt together."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from paceline.config.reward import AttachedConfig
from paceline.core.attached_clients.attachment import Leave
from paceline.core.errors import ConfigError
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.reward.attached.scorer import AttachedScorer
from paceline.reward.attached.servicer import GatewayServicer
from paceline.rpc.v1 import reward_pb2_grpc
from paceline.sdk import RewardAttachment
from paceline.service.grpc.server import start_server
from support.group_functions import rank
from support.reward_items import items, kinds


@asynccontextmanager
async def gateway(**config: Any) -> AsyncIterator[tuple[AttachedScorer, str]]:
    scorer = AttachedScorer(AttachedConfig(name="judge", group=True, **config), timeout_s=30.0)
    await scorer.start()
    servicer = GatewayServicer()
    servicer.gateways = {"judge": scorer.gateway}
    server = await start_server(reward_pb2_grpc.add_RewardGatewayServicer_to_server, servicer, port=0)
    try:
        yield scorer, server.address
    finally:
        await scorer.gateway.close(Leave(reason="over", for_good=True))
        await server.stop(grace_s=0)


async def test_an_attached_client_gets_whole_groups() -> None:
    async with gateway() as (scorer, address):
        client = asyncio.create_task(
            RewardAttachment(rank, address=address, name="judge", group=True, max_concurrent=2).run()
        )
        given = items({"a": ["xxx", "x"], "b": ["xx"], "c": ["nan", "x", "xx"], "d": ["raise", "x"]})
        scores = await scorer.score(given)
        assert kinds(scores) == [1.0, 0.0, 0.0, "not_finite", 0.0, 1.0, "raised", "raised"]
    async with asyncio.timeout(120):
        await client


async def test_a_group_goes_to_another_client_as_one_when_its_client_is_lost() -> None:
    started, sizes = asyncio.Event(), []
    loop = asyncio.get_running_loop()

    def slow(given: list[ScoreItem]) -> list[float]:
        loop.call_soon_threadsafe(started.set)
        import time

        time.sleep(1.0)
        return [9.0] * len(given)

    def quick(given: list[ScoreItem]) -> list[float]:
        sizes.append(len(given))
        return [1.0] * len(given)

    async with gateway() as (scorer, address):
        first = asyncio.create_task(RewardAttachment(slow, address=address, name="judge", group=True).run())
        scoring = asyncio.create_task(scorer.score(items({"a": ["x", "xx", "xxx"]})))
        async with asyncio.timeout(120):
            await started.wait()
        first.cancel()
        await asyncio.wait({first}, timeout=120)
        second = asyncio.create_task(RewardAttachment(quick, address=address, name="judge", group=True).run())
        assert kinds(await scoring) == [1.0, 1.0, 1.0]
        assert sizes == [3]
    async with asyncio.timeout(120):
        await second


async def test_a_client_that_scores_items_is_told_that_it_gets_groups() -> None:
    async with gateway() as (_, address):
        with pytest.raises(ConfigError, match="attach with group=True, or remove group: true"):
            await RewardAttachment(lambda response, truth: 1.0, address=address, name="judge").run()


def result(name: str, reward: float = 1.0) -> ScoreResult:
    return ScoreResult(trajectory_id=name, reward=reward)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((result("a1", 5.0), result("a0", 4.0)), [4.0, 5.0]),
        ((result("a0", math.nan), result("a1")), ["not_finite", 1.0]),
        ((result("a0"),), ["wrong_count"] * 2),
        ((result("a0"), result("a0")), ["wrong_count"] * 2),
        ((result("a0"), result("b0")), ["wrong_count"] * 2),
        (result("a0"), ["wrong_count"] * 2),
    ],
)
async def test_answers_to_a_group_are_one_for_each_item(answer: Any, expected: list[object]) -> None:
    class Answering(RewardAttachment):
        async def _answer(self, task: Any) -> Any:
            return answer

    async with gateway() as (scorer, address):
        client = asyncio.create_task(Answering(rank, address=address, name="judge", group=True).run())
        assert kinds(await scorer.score(items({"a": ["x", "xx"]}))) == expected
    async with asyncio.timeout(120):
        await client
