"""What a reward service says of itself: its contract, its version, the data sources that it scores."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.config.load import dump_yaml
from paceline.core.errors import PacelineError
from paceline.reward.check import main as check_rewards
from paceline.reward.remote.scorer import RemoteScorer, RemoteScorerOptions
from paceline.reward.scoring.cached import Cached
from paceline.reward.scoring.shape import Shape
from paceline.rpc.v1 import reward_pb2
from paceline.sdk import RewardServer
from support import cli_configs
from support.remote_scorer import items, kinds, scorer
from support.reward_servers import OddServer, serving


async def test_an_older_service_that_cannot_describe_itself_is_asked_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    server = OddServer()
    async with serving(server) as address, scorer(address) as remote:
        assert kinds(await remote.score(items("a"))) == ["1.0"]
        assert kinds(await remote.score(items("a"))) == ["1.0"]
    assert "speaks version 1 of the contract: it cannot say what it scores" in caplog.text
    assert server.num_described == 1


async def test_a_service_of_a_later_contract_gets_no_items_and_the_error_says_what_to_upgrade() -> None:
    server = OddServer(description=reward_pb2.RewardDescription(contract=3))
    async with serving(server) as address, scorer(address, retry_for_s=60.0) as remote:
        (score,) = await remote.score(items("a"))
    assert server.calls == []
    assert kinds([score]) == ["raised"]
    assert score.error is not None
    assert (
        "speaks version 3 of the contract of reward services; this Paceline speaks versions 1 to 2"
        in score.error[1]
    )
    assert "upgrade Paceline on the run's hosts" in score.error[1]


async def test_a_service_says_again_what_it_is_after_the_connection_was_lost() -> None:
    first = OddServer(description=reward_pb2.RewardDescription(contract=2, name="first"))
    async with serving(first) as address:
        remote = RemoteScorer(
            RemoteScorerOptions(name="judge", address=address, timeout_s=30.0, retry_for_s=60.0)
        )
        await remote.start()
        assert kinds(await remote.score(items("a"))) == ["1.0"]
        assert kinds(await remote.score(items("a"))) == ["1.0"]
    assert first.num_described == 1
    async with asyncio.timeout(120):  # gRPC learns on a thread of its own that the connection is gone
        while remote.version is not None:
            await asyncio.to_thread(time.sleep, 0.01)
    second = OddServer(description=reward_pb2.RewardDescription(contract=3))
    async with serving(second, port=int(address.rpartition(":")[2])):
        (score,) = await remote.score(items("a"))
    await remote.close()
    assert second.calls == []
    assert score.error is not None
    assert "speaks version 3" in score.error[1]


class Described(OddServer):
    """Says what it is when it is told to, or has an error."""

    def __init__(self) -> None:
        super().__init__(description=reward_pb2.RewardDescription(contract=2))
        self.may_answer, self.is_broken = asyncio.Event(), False
        self.may_answer.set()

    async def Describe(self, request: Any, context: object) -> reward_pb2.RewardDescription:
        description = await super().Describe(request, context)
        await self.may_answer.wait()
        if self.is_broken:
            raise PacelineError("no description")
        return description

    async def asked(self, times: int) -> None:
        """Returns when it was asked so often."""
        async with asyncio.timeout(120):
            while self.num_described < times:  # noqa: ASYNC110  a test's own look
                await asyncio.sleep(0.01)


class Halting(Described):
    """Says of its first call that it ran out of time, as the client would."""

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        response = await super().Score(request, context)
        if len(self.calls) == 1:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "too late")
        return response


async def test_a_service_is_asked_again_what_it_is_after_a_call_that_failed() -> None:
    """Its connection still stands, so nothing else tells that another version may answer now."""
    server = Halting()
    async with serving(server) as address, scorer(address, timeout_s=60.0) as remote:
        assert kinds(await remote.score(items("a"))) == ["timeout"]
        assert server.num_described == 1
        for _ in range(2):
            assert kinds(await remote.score(items("a"))) == ["1.0"]
            assert server.num_described == 2


async def test_calls_that_begin_at_once_ask_once_what_the_service_is() -> None:
    server = Described()
    async with serving(server) as address, scorer(address, timeout_s=60.0, max_items_per_call=1) as remote:
        assert server.num_described == 1
        server.may_answer.clear()
        remote._handshake.forget()  # as after a lost connection
        scorings = [asyncio.create_task(remote.score(items("a", "b"))) for _ in range(8)]
        await server.asked(2)
        await asyncio.sleep(0.2)  # in which another call would ask, too
        scorings[0].cancel()  # it began the question; the others get their answer all the same
        server.may_answer.set()
        for scoring in scorings[1:]:
            assert kinds(await scoring) == ["1.0", "1.0"]
        assert server.num_described == 2


async def test_calls_that_wait_for_the_same_answer_share_its_error_and_the_next_one_asks_again() -> None:
    server = Described()
    async with serving(server) as address, scorer(address, timeout_s=60.0) as remote:
        server.may_answer.clear()
        server.is_broken = True
        remote._handshake.forget()
        scorings = [asyncio.create_task(remote.score(items("a"))) for _ in range(4)]
        await server.asked(2)
        server.may_answer.set()
        assert [kinds(await scoring) for scoring in scorings] == [["raised"]] * 4
        assert (server.num_described, server.calls) == (2, [])
        server.is_broken = False
        assert kinds(await remote.score(items("a"))) == ["1.0"]
        assert server.num_described == 3


async def test_scores_of_another_version_of_a_service_are_not_remembered() -> None:
    first = OddServer(description=reward_pb2.RewardDescription(contract=2, version="1"))
    async with serving(first) as address:
        remote = RemoteScorer(
            RemoteScorerOptions(name="judge", address=address, timeout_s=30.0, retry_for_s=60.0)
        )
        cached = Cached(remote, 10)
        await remote.start()
        for _ in range(3):
            await cached.score(items("a"))
        assert len(first.calls) == 1
    second = OddServer(description=reward_pb2.RewardDescription(contract=2, version="2"))
    async with serving(second, port=int(address.rpartition(":")[2])):
        async with asyncio.timeout(120):
            while not second.calls:  # until the client hears that the connection is lost
                await cached.score(items("a"))
                await asyncio.sleep(0.01)
        for _ in range(3):
            await cached.score(items("a"))
        # The first finds the connection lost, and nobody knows then whose score that is.
        assert second.calls == [["t0"], ["t0"]]
        await cached.score(items("a", "b"))
        assert second.calls[2:] == [["t1"]], "the new one alone"
    await remote.close()


async def test_a_service_gets_items_of_the_data_sources_that_it_scores() -> None:
    server = OddServer(description=reward_pb2.RewardDescription(contract=2, data_sources=["gsm8k", "math"]))
    first, second = items("a", "b")
    rows = [replace(first, data_source="math"), replace(second, data_source="essays")]
    async with serving(server) as address:
        async with scorer(address) as remote:
            scores = await remote.score(rows)
            assert kinds(await remote.score(rows[1:])) == ["wrong_type"]
        assert kinds(scores) == ["1.0", "wrong_type"]
        assert server.calls == [["t0"]]
        assert scores[1].error is not None
        assert "does not score the data source 'essays' but gsm8k, math" in scores[1].error[1]
        async with scorer(address, shape=Shape(data_sources=("gsm8k", "essays"))) as remote:
            (score,) = await remote.score(rows[:1])
    assert score.error is not None
    assert (
        "scores gsm8k, math, but not essays, which data_sources of its configuration names" in score.error[1]
    )
    assert server.calls == [["t0"]]


async def test_the_sdks_server_says_what_it_scores(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with (
        RewardServer(lambda response, truth: 1.0, data_sources=["gsm8k"]) as server,
        scorer(server.address) as remote,
    ):
        assert kinds(await remote.score(items("a"))) == ["wrong_type"]
    assert "and scores gsm8k" in caplog.text


def test_a_run_is_refused_where_a_service_speaks_another_contract(tmp_path: Path) -> None:
    async def check(server: OddServer) -> int:
        async with serving(server) as address:
            services = [{"name": "judge", "address": address, "data_sources": ["gsm8k"]}]
            path = tmp_path / "run.yaml"
            path.write_text(dump_yaml(cli_configs.config(reward={"services": services})))
            return await asyncio.to_thread(check_rewards, ["scorers", str(path)])

    later = reward_pb2.RewardDescription(contract=3)
    other = reward_pb2.RewardDescription(contract=2, data_sources=["math"])
    good = reward_pb2.RewardDescription(contract=2, data_sources=["math", "gsm8k"])
    assert asyncio.run(check(OddServer(description=later))) != 0
    assert asyncio.run(check(OddServer(description=other))) != 0
    assert asyncio.run(check(OddServer(description=good))) == 0
    assert asyncio.run(check(OddServer())) == 0
