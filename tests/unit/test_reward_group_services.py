"""Reward services that score the samples of a prompt together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from paceline.config.reward import RewardConfig, RewardServiceConfig
from paceline.reward.remote.scorer import RemoteScorer, RemoteScorerOptions
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.reward.scoring.shape import Shape
from paceline.reward.weighted_sum import WeightedSum
from paceline.rpc.v1 import reward_pb2
from paceline.sdk import RewardServer
from support.group_functions import rank
from support.reward_items import GROUP, items, kinds
from support.reward_servers import OddServer, serving


@asynccontextmanager
async def remote(address: str, **options: Any) -> AsyncIterator[RemoteScorer]:
    settings = {"name": "judge", "address": address, "shape": GROUP, "timeout_s": 30.0, "retry_for_s": 30.0}
    scorer = RemoteScorer(RemoteScorerOptions(**(settings | options)))
    await scorer.start()
    yield scorer
    await scorer.close()


GROUPING = reward_pb2.RewardDescription(contract=2, groups=True)


async def test_a_server_of_the_sdk_is_called_once_for_each_prompt() -> None:
    async with RewardServer(rank, group=True) as server, remote(server.address) as scorer:
        scores = await scorer.score(items({"a": ["xxx", "x"], "b": ["xx"], "c": ["nan", "x", "xx"]}))
        assert kinds(scores) == [1.0, 0.0, 0.0, "not_finite", 0.0, 1.0]
        assert kinds(await scorer.score(items({"a": ["x", "raise"], "b": ["x", "xx"]}))) == [
            "raised", "raised", 0.0, 1.0,
        ]  # fmt: skip


async def test_calls_are_cut_between_groups_only() -> None:
    server = OddServer(description=GROUPING)
    given = items({"a": ["x"] * 3, "b": ["x"] * 2, "c": ["x"] * 4, "d": ["x"]})
    async with serving(server) as address:
        async with remote(address, max_items_per_call=4) as scorer:
            assert kinds(await scorer.score(given)) == [1.0] * 10
        groups = [sorted({name[0] for name in call}) for call in server.calls]
        assert sorted(groups) == [["a"], ["b"], ["c"], ["d"]]
        server.calls.clear()
        async with remote(address, max_items_per_call=5) as scorer:
            await scorer.score(given)
        assert sorted(map(len, server.calls)) == [5, 5]
        server.calls.clear()
        async with remote(address, max_items_per_call=3) as scorer:
            scores = await scorer.score(given)
    assert kinds(scores) == [1.0] * 5 + ["wrong_type"] * 4 + [1.0]
    assert scores[5].error is not None
    assert "a group of 4 items does not fit into max_items_per_call=3" in scores[5].error[1]
    assert max(map(len, server.calls)) <= 3


async def test_a_group_that_the_service_refuses_fails_alone_and_is_never_split() -> None:
    server = OddServer("refuse_bad", description=GROUPING)
    given = items({name: ["x", "x", "bad" if name == "c" else "x"] for name in "abcdef"})
    async with serving(server) as address, remote(address) as scorer:
        scores = await scorer.score(given)
    assert kinds(scores) == [1.0] * 6 + ["raised"] * 3 + [1.0] * 9
    for call in server.calls:
        assert all(sum(name[0] == group for name in call) in (0, 3) for group in "abcdef")


async def test_both_sides_must_mean_groups() -> None:
    for description, shape, sentence in (
        (None, GROUP, "does not score the samples of a prompt together"),
        (reward_pb2.RewardDescription(contract=2), GROUP, "serve_reward(f, group=True)"),
        (GROUPING, Shape(), "scores the samples of a prompt together: write group: true"),
    ):
        server = OddServer(description=description)
        async with serving(server) as address, remote(address, shape=shape) as scorer:
            (score,) = await scorer.score(items({"a": ["x"]}))
        assert server.calls == []
        assert score.error is not None
        assert sentence in score.error[1]


async def test_a_scorer_of_single_items_does_not_see_groups() -> None:
    seen: list[str] = []

    class Recording(OddServer):
        async def Score(self, request: Any, context: Any) -> Any:
            seen.extend(item.group for item in request.items)
            return await super().Score(request, context)

    async with serving(Recording()) as address:
        config = RewardConfig(services=(RewardServiceConfig(name="judge", address=address),))
        total = WeightedSum.configured(ScorerSettings(config=config))
        await total.start()
        await total.score(items({"a": ["x", "xx"]}))
        await total.close()
    assert seen == ["", ""]
