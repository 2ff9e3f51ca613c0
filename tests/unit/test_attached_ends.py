"""How the streams of attached clients end, and how they are opened again."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cli.certificates import Authority
from paceline.core.attached_clients.attachment import (
    Hello,
    Leave,
    Welcome,
)
from paceline.core.errors import (
    ConfigError,
    RewardError,
    RewardErrorKind,
)
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.sdk import RewardAttachment
from paceline.service.attach.gateway import Gateway, GatewayOptions
from paceline.service.identity import tokens
from paceline.service.identity.credentials import Credentials, TlsFiles
from support.attached_scorers import ended, items, run
from support.clocks import ManualClock


async def test_a_client_that_is_stopped_answers_what_it_has() -> None:
    began, may_end = threading.Semaphore(0), threading.Event()

    def slow(response: str, ground_truth: str) -> float:
        began.release()
        may_end.wait(120)
        return 5.0

    async with run() as service:
        attachment = RewardAttachment(slow, address=service.address, name="judge", max_concurrent=2)
        client = asyncio.create_task(attachment.run())
        await service.clients(1)
        scoring = asyncio.create_task(service.scorer.score(items("a", "b")))
        for _ in range(2):
            assert await asyncio.to_thread(began.acquire, timeout=120)
        attachment.stop()
        may_end.set()
        async with asyncio.timeout(120):
            await client
        assert [score.reward for score in await scoring] == [5.0, 5.0]


async def test_the_end_of_the_run_ends_the_client_and_that_of_a_service_does_not() -> None:
    async with run() as service:
        client = service.attach()
        await service.clients(1)
        port = service.server.port
    await asyncio.sleep(0.1)
    assert not client.done()
    async with run(port=port) as service:
        assert [score.reward for score in await service.scorer.score(items("abc"))] == [3.0]
        await service.scorer.gateway.close(Leave(reason="the run is over", for_good=True))
        async with asyncio.timeout(120):
            await client


async def test_the_end_of_the_run_ends_a_client_that_is_still_at_work_when_the_stream_breaks_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has heard the goodbye: nobody will be there however long it tries again."""
    monkeypatch.setattr("paceline.service.attach.gateway._LEAVE_GRACE_S", 0.3)
    began = asyncio.Event()

    async def endless(response: str, ground_truth: str) -> float:
        began.set()
        await asyncio.Event().wait()
        return 0.0

    async with run() as service:
        client = service.attach(endless)
        scoring = asyncio.create_task(service.scorer.score(items("a")))
        async with asyncio.timeout(120):
            await began.wait()
        await service.scorer.gateway.close(Leave(reason="the run is over", for_good=True))
        assert not client.done()
        await service.server.stop(grace_s=0)
        async with asyncio.timeout(120):
            await client
        await scoring


async def test_a_stream_that_the_run_ends_leaves_no_task_behind() -> None:
    async with run() as it:
        before = asyncio.all_tasks()
        client = it.attach(patience_s=600)
        await it.clients(1)
        await it.server.stop(grace_s=0)
        async with asyncio.timeout(120):
            # What reads the client's messages for gRPC ends by itself, and is not left to the collector.
            while any(  # noqa: ASYNC110  a test's own look
                "consume_request_iterator" in repr(task) for task in asyncio.all_tasks() - before
            ):
                await asyncio.sleep(0.05)
        client.cancel()
        with suppress(asyncio.CancelledError):
            await client


async def test_a_client_whose_calls_all_hang_leaves_and_its_items_go_to_others() -> None:
    released = threading.Event()

    def hangs(response: str, ground_truth: str) -> float:
        released.wait(600)
        return 1.0

    async with run() as service:
        stuck = service.attach(hangs, max_concurrent=2, timeout_s=0.2)
        await service.clients(1)
        scoring = asyncio.create_task(service.scorer.score(items("a", "a", "a", "a")))
        with pytest.raises(RewardError, match="calls of hangs hang"):
            async with asyncio.timeout(120):
                await stuck
        client = service.attach()
        scores = await scoring
        # The third may have come in between the ends of the first two.
        assert scores[3].reward == 1.0
        assert all(score.reward == 1.0 or "TimeoutError" in str(score.error) for score in scores)
        await ended(client)
    released.set()


async def test_a_stream_is_opened_again_without_loss_until_its_token_expires(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with run(token="secret") as service, asyncio.timeout(120):
        gateway = service.scorer.gateway
        gateway._options = replace(gateway._options, stream_age_s=0.2)
        names: list[str] = []
        serve = gateway.serve

        def counted(hello: Hello, messages: Any) -> Any:
            names.append(hello.client)
            return serve(hello, messages)

        gateway.serve = counted  # type: ignore[method-assign]
        now = ManualClock(time.time())
        monkeypatch.setattr(tokens, "time", SimpleNamespace(time=now.wall))
        token = tokens.mint("secret", tokens.Scope.ATTACH, expires_at=now.wall() + 60)
        client = service.attach(token=token)
        while len(names) < 3:
            scores = await service.scorer.score(items(*["abc"] * 20))
            assert {score.reward for score in scores} == {3.0}
        assert not client.done()
        now.advance(61)
        with pytest.raises(ConfigError, match="refused the token"):
            await client
        gateway._options = replace(gateway._options, wait_for_s=0.1)
        (score,) = await service.scorer.score(items("a"))
        assert score.error_kind is RewardErrorKind.UNAVAILABLE


async def test_a_client_attaches_over_tls_with_the_authority_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority.create(tmp_path, days=1)
    authority.issue(tmp_path / "reward", "reward", role="reward")
    caller = tmp_path / "caller"
    caller.mkdir()
    shutil.copy(tmp_path / "reward" / "ca.pem", caller)
    monkeypatch.setenv("PACELINE_TLS_DIR", str(caller))
    credentials = Credentials(token="secret", tls=TlsFiles(tmp_path / "reward")).for_outside_callers()
    async with run(credentials=credentials) as service:
        client = service.attach(token="secret")
        assert [score.reward for score in await service.scorer.score(items("a", "bb"))] == [1.0, 2.0]
        await ended(client)


async def test_a_client_that_has_left_when_it_is_asked_to_leave_ends_its_stream_in_order() -> None:
    gateway: Gateway[ScoreItem, ScoreResult] = Gateway(
        GatewayOptions(
            name="judge",
            answer_within_s=5.0,
            wait_for_s=5.0,
            source_of=lambda item: "",
            size_of=lambda item: 1,
        )
    )
    gone = asyncio.Event()

    async def messages() -> AsyncIterator[Leave]:
        await gone.wait()
        return
        yield Leave(reason="never")

    stream = gateway.serve(Hello(name="judge", client="quick", window=1), messages())
    assert isinstance(await anext(stream), Welcome)
    closing = asyncio.create_task(gateway.close(Leave(reason="over", for_good=True)))
    async with asyncio.timeout(120):
        assert isinstance(await anext(stream), Leave)
        gone.set()
        await closing
        assert await anext(stream, None) is None
