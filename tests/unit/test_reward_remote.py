"""Scoring by a remote service, well-behaved or not, over real gRPC; and its sum with functions."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.cli.certificates import Authority
from paceline.config.load import dump_yaml
from paceline.config.reward import RewardConfig, RewardFunctionConfig, RewardServiceConfig
from paceline.core.errors import ConfigError, PacelineError, RewardErrorKind
from paceline.core.scoring import ScoreItem
from paceline.core.user_functions.reward_function import check_extra_keys
from paceline.reward.check import main as check_rewards
from paceline.reward.functions.pool import function_specs
from paceline.reward.remote.scorer import RemoteScorer, RemoteScorerOptions
from paceline.reward.scoring.cached import Cached
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.reward.scoring.scores import Score, join_error, split_error
from paceline.reward.scoring.shape import Shape
from paceline.reward.weighted_sum import WeightedSum
from paceline.rpc.v1 import reward_pb2
from paceline.sdk import RewardServer
from paceline.service.identity.credentials import Credentials, TlsFiles
from support import cli_configs
from support.reward_servers import OddServer, serving


def items(*responses: str) -> list[ScoreItem]:
    return [
        ScoreItem(trajectory_id=f"t{index}", prompt="", response=response, ground_truth="aa")
        for index, response in enumerate(responses)
    ]


@asynccontextmanager
async def scorer(
    address: str,
    *,
    shape: Shape = Shape(),  # noqa: B008  it is frozen
    timeout_s: float = 30.0,
    retry_for_s: float = 0.0,
    **options: Any,
) -> AsyncIterator[RemoteScorer]:
    remote = RemoteScorer(
        RemoteScorerOptions(
            name="judge",
            address=address,
            shape=shape,
            timeout_s=timeout_s,
            retry_for_s=retry_for_s,
            **options,
        )
    )
    await remote.start()
    yield remote
    await remote.close()


def kinds(scores: list[Score]) -> list[str]:
    return [score.error[0].value if score.error else str(score.reward) for score in scores]


async def test_rewards_are_weighted_and_components_named() -> None:
    server = OddServer("reversed")
    async with serving(server) as address, scorer(address, shape=Shape(weight=0.5)) as remote:
        scores = await remote.score(items("a b", "c"), run_id="r", step=7)
    assert [score.trajectory_id for score in scores] == ["t0", "t1"]
    assert [score.reward for score in scores] == [1.5, 0.5]
    assert scores[0].components == {"judge": 3.0, "judge/words": 2.0}
    assert server.step == 7


async def test_calls_are_cut_by_number_and_by_size() -> None:
    server = OddServer()
    async with serving(server) as address:
        async with scorer(address, max_items_per_call=2) as remote:
            assert kinds(await remote.score(items("a", "b", "c", "d", "e"))) == ["1.0"] * 5
        assert sorted(server.calls) == [["t0", "t1"], ["t2", "t3"], ["t4"]]
        server.calls.clear()
        async with scorer(address, max_message_bytes=2000) as remote:
            assert kinds(await remote.score(items("x" * 600, "y" * 600, "z"))) == ["600.0", "600.0", "1.0"]
        assert sorted(server.calls) == [["t0"], ["t1", "t2"]]


@pytest.mark.parametrize(
    ("mode", "expected", "sentence"),
    [
        ("too_few", ["wrong_count", "wrong_count"], "one result for each item"),
        ("too_many", ["wrong_count", "wrong_count"], "one result for each item"),
        ("other_ids", ["wrong_count", "wrong_count"], "under its item's trajectory_id"),
        ("nan", ["not_finite", "1.0"], "reward is nan"),
        ("infinite_component", ["not_finite", "1.0"], "c is inf"),
        ("error", ["raised", "1.0"], "judge: no opinion"),
        ("typed_error", ["not_finite", "1.0"], "judge: f returned nan"),
        ("raise", ["raised", "raised"], "judge: the judge has no model"),
        ("hang", ["timeout", "timeout"], "REWARD: no answer from reward service judge at 127.0.0.1:"),
    ],
)
async def test_bad_answers_are_typed(mode: str, expected: list[str], sentence: str) -> None:
    timeout_s = 0.5 if mode == "hang" else 30.0
    async with serving(OddServer(mode)) as address, scorer(address, timeout_s=timeout_s) as remote:
        scores = await remote.score(items("a", "b"))
    assert kinds(scores) == expected
    assert scores[0].error is not None
    assert sentence in scores[0].error[1]


async def test_an_overflow_by_the_weight_is_not_finite() -> None:
    async with serving(OddServer("huge")) as address, scorer(address, shape=Shape(weight=10.0)) as remote:
        assert kinds(await remote.score(items("a"))) == ["not_finite"]


async def test_a_timeout_is_tried_again_in_smaller_calls_until_only_the_slow_item_fails() -> None:
    server = OddServer("hang_on_slow")
    async with serving(server) as address, scorer(address, timeout_s=3.0, retry_for_s=60.0) as remote:
        scores = await remote.score(items(*["a"] * 20, "slow", *["b"] * 19))
    assert [index for index, kind in enumerate(kinds(scores)) if kind != "1.0"] == [20]
    assert kinds(scores)[20] == "timeout"
    assert [len(call) for call in server.calls] == [40, *[2] * 20, 1, 1]


async def test_an_item_that_the_service_refuses_fails_alone() -> None:
    server = OddServer("refuse_bad")
    async with serving(server) as address, scorer(address, retry_for_s=60.0) as remote:
        scores = await remote.score(items(*["a"] * 20, "bad", *["b"] * 19))
    assert [index for index, kind in enumerate(kinds(scores)) if kind != "1.0"] == [20]
    assert scores[20].error == (RewardErrorKind.RAISED, "judge: one response is bad")
    assert [len(call) for call in server.calls] == [40, *[2] * 20, 1, 1]


async def test_a_service_that_refuses_everything_is_not_asked_item_by_item() -> None:
    server = OddServer("raise")
    async with serving(server) as address, scorer(address, retry_for_s=60.0) as remote:
        assert kinds(await remote.score(items(*["a"] * 64))) == ["raised"] * 64
    assert [len(call) for call in server.calls] == [64, *[4] * 16]


async def test_a_slow_answer_can_be_saved_by_a_second_attempt() -> None:
    async with (
        serving(OddServer("slow_once")) as address,
        scorer(address, timeout_s=3.0, retry_for_s=60.0) as remote,
    ):
        assert kinds(await remote.score(items("a", "b"))) == ["1.0"] * 2


async def test_a_service_with_too_much_to_do_is_asked_again_with_the_same_call() -> None:
    server = OddServer("busy_twice")
    async with serving(server) as address, scorer(address, retry_for_s=60.0) as remote:
        assert kinds(await remote.score(items("a", "b"))) == ["1.0"] * 2
    assert server.calls == [["t0", "t1"]] * 3


async def test_a_service_that_comes_back_is_found_again() -> None:
    async with serving(OddServer()) as address:
        port = int(address.rpartition(":")[2])
        remote = RemoteScorer(
            RemoteScorerOptions(name="judge", address=address, timeout_s=30.0, retry_for_s=60.0)
        )
        await remote.start()
    scoring = asyncio.create_task(remote.score(items("a")))
    await asyncio.sleep(1.5)
    async with serving(OddServer(), port=port):
        assert kinds(await scoring) == ["1.0"]
    await remote.close()


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


async def test_no_more_calls_are_made_at_once_than_allowed() -> None:
    server = OddServer("counting")
    async with serving(server) as address, scorer(address, max_items_per_call=1, concurrency=3) as remote:
        assert kinds(await remote.score(items(*["a"] * 12))) == ["1.0"] * 12
    assert server.most_at_once == 3


async def test_a_service_that_hangs_costs_its_timeout_a_few_times_and_is_then_spared() -> None:
    server = OddServer("hang")
    async with (
        serving(server) as address,
        scorer(address, timeout_s=0.3, retry_for_s=2.0, max_items_per_call=32) as remote,
    ):
        started = time.monotonic()
        scores = await remote.score(items(*["a"] * 512))
        assert set(kinds(scores)) <= {"timeout", "unavailable"}
        assert all("no answer from reward service judge" in score.error[1] for score in scores if score.error)
        # 16 calls of 32 at once; the breaker opens, and lets single calls through.
        assert len(server.calls) <= 16 + 4
        assert time.monotonic() - started < 200
        server.mode = "right"
        async with asyncio.timeout(60):  # a busy machine may be late with a good answer, too
            while kinds(await remote.score(items("a"))) != ["1.0"]:
                pass


async def test_the_service_gets_the_token_of_its_own_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("its own\n")
    async with serving(OddServer(), token="its own") as address:
        for file, expected in ((str(token_file), "1.0"), (None, "raised")):
            service = RewardServiceConfig(name="judge", address=address, token_file=file)
            settings = ScorerSettings(
                config=RewardConfig(services=(service,)), credentials=Credentials(token="the run's")
            )
            (remote,) = RemoteScorer.configured(settings)
            await remote.start()
            (score,) = await remote.score(items("a"))
            assert kinds([score]) == [expected]
            await remote.close()
    assert score.error is not None
    assert "name a file with its token as token_file" in score.error[1]
    assert "the same PACELINE_REWARD_TOKEN" in score.error[1]


async def called(address: str, credentials: Credentials, **keys: Any) -> str:
    """What becomes of an item of a service that is configured with these keys."""
    service = RewardServiceConfig(name="judge", address=address, retry_for_s=0.0, **keys)
    settings = ScorerSettings(config=RewardConfig(services=(service,)), credentials=credentials)
    (remote,) = RemoteScorer.configured(settings)
    await remote.start()
    (kind,) = kinds(await remote.score(items("a")))
    await remote.close()
    return kind


async def test_a_service_may_have_tls_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has an authority; one service is of another, with another name, and one speaks plain text."""
    monkeypatch.setattr("paceline.reward.remote.scorer._REACH_TIMEOUT_S", 1.0)
    for name in ("run", "other"):
        authority = Authority.create(tmp_path / name, days=1)
        authority.issue(tmp_path / name / "reward", "reward", role="reward", hosts=["judge.example.org"])
    run = Credentials(token="secret", tls=TlsFiles(tmp_path / "run" / "reward"))
    trust = tmp_path / "trust"
    trust.mkdir()
    shutil.copy(tmp_path / "other" / "reward" / "ca.pem", trust)
    other = replace(run, tls=TlsFiles(tmp_path / "other" / "reward")).for_outside_callers()
    async with serving(OddServer(), credentials=other) as address:
        assert await called(address, run) == "unavailable"
        assert await called(address, run, tls_dir=str(trust)) == "1.0"
        assert await called(address, Credentials(token="secret"), tls_dir=str(trust)) == "1.0"
        assert await called(address, run, tls_dir=str(trust), tls_name="judge.example.org") == "1.0"
        assert await called(address, run, tls_dir=str(trust), tls_name="x.example.org") == "unavailable"
    async with serving(OddServer(), token="secret") as address:
        assert await called(address, run) == "unavailable"
        assert await called(address, run, tls=False) == "1.0"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"tls_dir": "/nowhere"}, "tls_dir=/nowhere of the reward service 'judge' cannot be used"),
        ({"tls": True}, "'judge' is called over TLS, but there are no files for it: name a folder"),
        ({"tls_name": "x"}, "'judge' is called over TLS, but there are no files for it: name a folder"),
    ],
)
def test_tls_that_cannot_be_is_refused(keys: dict[str, Any], sentence: str) -> None:
    service = RewardServiceConfig(name="judge", address="a:1", **keys)
    with pytest.raises(ConfigError, match=sentence):
        RemoteScorer.configured(ScorerSettings(config=RewardConfig(services=(service,))))
    with pytest.raises(ValueError, match="has tls: false, where tls_dir would have no effect"):
        RewardServiceConfig(name="judge", address="a:1", tls=False, tls_dir="x")


async def test_a_service_in_plain_text_on_another_machine_does_not_get_the_token() -> None:
    service = RewardServiceConfig(name="judge", address="192.0.2.1:1", tls=False)
    settings = ScorerSettings(
        config=RewardConfig(services=(service,)), credentials=Credentials(token="secret")
    )
    (remote,) = RemoteScorer.configured(settings)
    with pytest.raises(ConfigError, match="refusing to send the token to 192.0.2.1:1 in plain text"):
        await remote.start()


async def test_a_service_has_limits_of_its_own() -> None:
    server = OddServer("hang")
    async with serving(server) as address:
        service = RewardServiceConfig(name="judge", address=address, timeout_s=0.2, retry_for_s=0.0)
        settings = ScorerSettings(config=RewardConfig(services=(service,), timeout_s=60.0))
        (remote,) = RemoteScorer.configured(settings)
        await remote.start()
        (score,) = await remote.score(items("a"))
        await remote.close()
    assert kinds([score]) == ["timeout"]
    assert score.error is not None
    assert "within 0.2 s" in score.error[1]


async def test_calls_are_repeated_for_as_long_as_the_service_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.reward.remote.scorer._REACH_TIMEOUT_S", 0.1)
    service = RewardServiceConfig(name="judge", address="127.0.0.1:1", retry_for_s=0.0)
    (remote,) = RemoteScorer.configured(ScorerSettings(config=RewardConfig(services=(service,))))
    await remote.start()
    started = time.monotonic()
    assert kinds(await remote.score(items("a"))) == ["unavailable"]
    assert time.monotonic() - started < 200
    await remote.close()


def test_a_token_file_that_cannot_be_read_is_named() -> None:
    service = RewardServiceConfig(name="judge", address="a:1", token_file="/nowhere/token")
    with pytest.raises(ConfigError, match="token_file=/nowhere/token of the reward service 'judge' cannot"):
        RemoteScorer.configured(ScorerSettings(config=RewardConfig(services=(service,))))


async def test_a_service_that_is_not_there_is_unavailable_after_the_retries(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.reward.remote.scorer._REACH_TIMEOUT_S", 0.2)
    remote = RemoteScorer(RemoteScorerOptions(name="judge", address="127.0.0.1:1", retry_for_s=1.0))
    await remote.start()
    assert "reward service judge at 127.0.0.1:1 cannot be reached (yet)" in caplog.text
    started = time.monotonic()
    scores = await remote.score(items("a"))
    assert kinds(scores) == ["unavailable"]
    assert time.monotonic() - started < 200
    assert scores[0].error is not None
    assert "judge at 127.0.0.1:1 cannot be reached" in scores[0].error[1]
    await remote.close()


@pytest.mark.parametrize("kind", list(RewardErrorKind))
def test_error_kinds_survive_the_wire(kind: RewardErrorKind) -> None:
    assert split_error(join_error(kind, "because: of this")) == (kind, "because: of this")


def test_an_error_without_a_kind_was_raised() -> None:
    assert split_error("KeyError: 3") == (RewardErrorKind.RAISED, "KeyError: 3")


def config(address: str, **changes: object) -> RewardConfig:
    return RewardConfig(
        functions=(
            RewardFunctionConfig(name="exact_match", weight=2.0),
            RewardFunctionConfig(name="support.reward_functions:length", weight=0.5),
        ),
        services=(RewardServiceConfig(name="judge", address=address, weight=-1.0),),
        timeout_s=30.0,
        **changes,  # type: ignore[arg-type]
    )


async def test_the_weighted_sum_adds_functions_and_services() -> None:
    async with serving(OddServer()) as address:
        total = WeightedSum.configured(ScorerSettings(config=config(address, max_reward=1.0)))
        await total.start()
        scores = await total.score(items("aa", "b", "ccc"))
        assert await total.score([]) == []
        await total.close()
    assert kinds(scores) == [str(2.0 + 1.0 - 2.0), "-0.5", "-1.5"]
    assert scores[0].components == {"exact_match": 1.0, "length": 2.0, "judge": 2.0, "judge/words": 1.0}


async def test_the_range_of_the_sum_is_checked() -> None:
    async with serving(OddServer()) as address:
        reward = config(address, min_reward=-1.0, max_reward=0.5)
        total = WeightedSum.configured(ScorerSettings(config=reward))
        await total.start()
        scores = await total.score(items("aa", "b", "ccc"))
        await total.close()
    assert kinds(scores) == ["out_of_range", "-0.5", "out_of_range"]


def test_component_names_are_unique() -> None:
    repeated = RewardConfig(
        functions=(
            RewardFunctionConfig(name="gsm8k"),
            RewardFunctionConfig(name="gsm8k", kwargs={"method": "flexible"}),
            RewardFunctionConfig(name="path/to/file.py:score"),
        )
    )
    specs = function_specs(repeated)
    assert [spec.name for spec in specs] == ["gsm8k", "gsm8k_2", "score"]
    assert specs[1].arguments == {"method": "flexible"}
    with pytest.raises(ConfigError, match="two scorers are named 'score'"):
        services = (RewardServiceConfig(name="score", address="a:1"),)
        WeightedSum.configured(ScorerSettings(config=repeated.model_copy(update={"services": services})))


def test_a_function_named_as_a_total_gets_another_component() -> None:
    """`val/reward/mean` is the mean of the sums."""
    config = RewardConfig(functions=(RewardFunctionConfig(name="mine.py:reward"),))
    assert [spec.name for spec in function_specs(config)] == ["reward_function"]


def test_columns_may_not_shadow_what_a_function_is_given() -> None:
    check_extra_keys(["level"])
    with pytest.raises(ConfigError, match="data.extra_keys names prompt, response"):
        check_extra_keys(["response", "level", "prompt"])


async def test_scorers_take_their_data_sources_clip_and_may_fail_where_they_are_not_required() -> None:
    async with serving(OddServer("refuse_bad")) as address:
        config = RewardConfig(
            functions=(
                RewardFunctionConfig(name="exact_match", data_sources=("maths",)),
                RewardFunctionConfig(name="support.reward_functions:obedient", required=False, weight=0.25),
            ),
            services=(
                RewardServiceConfig(
                    name="judge",
                    address=address,
                    max_value=2.0,
                    min_value=1.5,
                    weight=10.0,
                    required=False,
                    data_sources=("essays",),
                    retry_for_s=0.0,
                ),
            ),
        )
        total = WeightedSum.configured(ScorerSettings(config=config))
        await total.start()
        rows = [("aa", "maths"), ("raise", "essays"), ("a", "essays"), ("bad", "essays"), ("nan", "other")]
        batches = [
            [
                ScoreItem(
                    trajectory_id="t", prompt="", response=response, ground_truth="aa", data_source=source
                )
            ]
            for response, source in rows
        ]
        scores = [score for batch in batches for score in await total.score(batch)]
        await total.close()
    assert [score.reward for score in scores] == [1.25, 20.0, 15.25, 0.25, 0.25]
    assert scores[0].components == {"exact_match": 1.0, "obedient": 1.0, "obedient/failed": 0.0}
    assert scores[1].components == {
        "obedient/failed": 1.0, "judge": 5.0, "judge/words": 1.0, "judge/failed": 0.0,
    }  # fmt: skip
    assert scores[3].components == {"obedient": 1.0, "obedient/failed": 0.0, "judge/failed": 1.0}
