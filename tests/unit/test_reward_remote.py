"""Scoring by a remote service, well-behaved or not, over real gRPC."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.certificates import Authority
from paceline.config.reward import RewardConfig, RewardServiceConfig
from paceline.core.errors import ConfigError, RewardErrorKind
from paceline.reward.remote.scorer import RemoteScorer, RemoteScorerOptions
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.reward.scoring.scores import join_error, split_error
from paceline.reward.scoring.shape import Shape
from paceline.service.identity.credentials import Credentials, TlsFiles
from support.remote_scorer import items, kinds, scorer
from support.reward_servers import OddServer, serving


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
