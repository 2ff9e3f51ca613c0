"""Clients that attach to a reward service: what they score, together, late or not at all."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.attached_clients.attachment import (
    Answers,
)
from paceline.core.scoring import ScoreItem
from paceline.reward.scoring.cached import Cached
from paceline.sdk import RewardAttachment
from support.attached_scorers import RawClient, answer, ended, items, run
from support.clocks import ManualClock


async def test_one_client_scores_for_several_reward_services() -> None:
    """As a reward model does: it is loaded once, and its batches hold items of whoever has some."""
    asked, started = [0], threading.Event()
    batches: list[list[str]] = []

    async def score(rows: list[ScoreItem]) -> list[float]:
        asked[0] += 1
        if asked[0] == 1:
            await asyncio.to_thread(started.wait, 60)
        batches.append([row.response for row in rows])
        return [float(len(row.response)) for row in rows]

    async with run() as first_run, run() as second_run:
        attachment = RewardAttachment(
            score, address=[first_run.address, second_run.address], name="judge", batch=True
        )
        running = asyncio.create_task(attachment.run())
        await first_run.clients(1)
        await second_run.clients(1)
        first = asyncio.create_task(first_run.scorer.score(items("a")))
        async with asyncio.timeout(120):
            while not asked[0]:  # noqa: ASYNC110  the function runs in another thread
                await asyncio.sleep(0.01)
        rest = [
            asyncio.create_task(first_run.scorer.score(items("bb", "ccc"))),
            asyncio.create_task(second_run.scorer.score(items("dddd"))),
        ]
        async with asyncio.timeout(120):
            while len(attachment._batches._waiting) < 3:  # type: ignore[union-attr]  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        started.set()
        scores = [[score.reward for score in await each] for each in (first, *rest)]
        attachment.stop()
        await running
    assert scores == [[1.0], [2.0, 3.0], [4.0]]
    assert batches[0] == ["a"]
    assert sorted(batches[1]) == ["bb", "ccc", "dddd"]
    assert len(batches) == 2


async def test_scores_of_another_version_of_the_clients_are_not_remembered() -> None:
    asked: list[str] = []

    def scoring(value: float) -> Callable[..., float]:
        def score(response: str, ground_truth: str) -> float:
            asked.append(f"{response}{value:g}")
            return value

        return score

    async with run() as it:
        cached = Cached(it.scorer, 10)

        async def score() -> float | None:
            return (await cached.score(items("a")))[0].reward

        first = it.attach(scoring(1.0), version="1")
        await it.clients(1)
        assert [await score() for _ in range(3)] == [1.0] * 3
        assert asked == ["a1"]
        second = it.attach(scoring(2.0), version="2")
        await it.clients(2)
        await score()  # by either: nobody knows whose score would be remembered
        await score()
        assert len(asked) == 3
        await ended(first)
        await it.clients(1)
        assert [await score() for _ in range(3)] == [2.0] * 3
        assert asked[3:] == ["a2"]
        await ended(second)
        await it.clients(0)
        assert await score() == 2.0, "remembered while nobody is there"
        third = it.attach(scoring(3.0))  # its file says which version it is
        await it.clients(1)
        assert [await score() for _ in range(2)] == [3.0] * 2
        assert asked[4:] == ["a3"]
        await ended(third)


async def test_a_client_scores_what_the_run_sends() -> None:
    async with run(weight=0.5) as service:
        client = service.attach()
        scores = await service.scorer.score(items("a", "bb", ""))
        assert [score.reward for score in scores] == [0.5, 1.0, 0.0]
        assert [score.components for score in scores] == [{"judge": 1.0}, {"judge": 2.0}, {"judge": 0.0}]
        await ended(client)


async def test_a_ready_file_is_there_while_its_client_is_attached(tmp_path: Path) -> None:
    file, program = tmp_path / "attached", tmp_path / "client.py"
    program.write_text(
        "import sys\n"
        "from paceline.sdk import attach_reward\n"
        "def f(response, ground_truth): return 1.0\n"
        "attach_reward(f, address=sys.argv[1], name='judge', ready_file=sys.argv[2])\n"
    )

    async def until(is_there: bool) -> None:
        async with asyncio.timeout(60):
            while file.exists() is not is_there:  # noqa: ASYNC110  a test's own look
                await asyncio.sleep(0.02)

    async with run() as service:
        command = (sys.executable, str(program), service.address)
        port = int(service.address.rpartition(":")[2])
        client = await asyncio.create_subprocess_exec(*command, str(file))
        await until(True)
        assert service.scorer.gateway.num_clients == 1
        file.unlink()
        await until(True)  # written again and again
    try:
        await until(False)
        async with run(port=port):
            await until(True)
            client.terminate()
            async with asyncio.timeout(60):
                assert await client.wait() == 0
            assert not file.exists()
            nowhere = str(tmp_path / "none" / "attached")
            unwritable = await asyncio.create_subprocess_exec(
                *command, nowhere, stderr=asyncio.subprocess.PIPE
            )
            async with asyncio.timeout(60):
                _, said = await unwritable.communicate()
        assert unwritable.returncode == 2
        assert b"attached cannot be written: No such file or directory" in said
    finally:
        if client.returncode is None:
            client.kill()
            await client.wait()


async def test_async_and_batch_functions_work_and_the_window_bounds_what_is_sent() -> None:
    sizes: list[int] = []

    async def waits(response: str, ground_truth: str) -> float:
        await asyncio.sleep(0.01)
        return 1.0

    def batch(given: list[ScoreItem]) -> list[float]:
        sizes.append(len(given))
        return [2.0] * len(given)

    async with run() as service:
        client = service.attach(waits)
        assert {score.reward for score in await service.scorer.score(items(*["a"] * 40))} == {1.0}
        await ended(client)
        await service.clients(0)
        client = service.attach(batch, batch=True, max_batch=8)
        assert {score.reward for score in await service.scorer.score(items(*["a"] * 40))} == {2.0}
        assert max(sizes) <= 8
        assert sum(sizes) == 40
        await ended(client)


async def test_a_batch_leaves_out_what_nobody_waits_for() -> None:
    """The items of a stream that has ended meanwhile went to another client."""
    began, go_on = asyncio.Event(), threading.Event()
    batches: list[list[str]] = []

    async def score(rows: list[ScoreItem]) -> list[float]:
        batches.append([row.response for row in rows])
        loop.call_soon_threadsafe(began.set)
        await asyncio.to_thread(go_on.wait, 60)
        return [1.0] * len(rows)

    loop = asyncio.get_running_loop()
    async with run() as gone, run() as stays:
        attachment = RewardAttachment(score, address=[gone.address, stays.address], name="judge", batch=True)
        running = asyncio.create_task(attachment.run())
        await gone.clients(1)
        await stays.clients(1)
        first = asyncio.create_task(stays.scorer.score(items("a")))
        async with asyncio.timeout(120):
            await began.wait()
        lost = asyncio.create_task(gone.scorer.score(items("b")))
        kept = asyncio.create_task(stays.scorer.score(items("c")))
        async with asyncio.timeout(120):
            while len(attachment._batches._waiting) < 2:  # noqa: ASYNC110  a test's own look
                await asyncio.sleep(0.01)
            await gone.server.stop(grace_s=0)
            while not any(done.cancelled() for _, done in attachment._batches._waiting):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        go_on.set()
        async with asyncio.timeout(120):
            assert [score.reward for score in (*await first, *await kept)] == [1.0, 1.0]
        assert batches == [["a"], ["c"]]
        lost.cancel()
        await ended(lost, running)


async def test_two_clients_share_the_load() -> None:
    counts = {"a": 0, "b": 0}

    def counting(name: str) -> Callable[[str, str], float]:
        def function(response: str, ground_truth: str) -> float:
            counts[name] += 1
            time.sleep(0.01)
            return 1.0

        return function

    async with run() as service:
        clients = [service.attach(counting(name), max_concurrent=4) for name in counts]
        await service.clients(2)
        await service.scorer.score(items(*["a"] * 60))
        assert sum(counts.values()) == 60
        assert min(counts.values()) >= 15
        await ended(*clients)


async def test_items_of_a_client_that_vanishes_go_to_one_that_comes_later() -> None:
    async with run() as service:
        lost = RawClient(service.address)
        await lost.hello(window=2)
        scoring = asyncio.create_task(service.scorer.score(items("a", "bb", "ccc")))
        assert len(await lost.work()) == 2
        await lost.close()
        await service.clients(0)
        client = service.attach()
        assert [score.reward for score in await scoring] == [1.0, 2.0, 3.0]
        await ended(client)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """The gateway's, by which answers are late: only the test moves it."""
    clock = ManualClock()
    monkeypatch.setattr("paceline.service.attach.gateway.time", clock)
    return clock


async def test_an_item_that_is_answered_late_goes_to_another_and_counts_once(clock: ManualClock) -> None:
    async with run(wait_for_s=1000.0) as service, asyncio.timeout(120):
        slow = RawClient(service.address)
        await slow.hello(window=1)
        scoring = asyncio.create_task(service.scorer.score(items("abc")))
        ((ticket, item),) = await slow.work()
        client = service.attach()
        await service.clients(2)
        clock.advance(30.0)
        (score,) = await scoring
        assert score.reward == 3.0
        slow.say(Answers((answer(ticket, item),)))  # late: it has no effect, and is forgiven
        # Whom the next item goes to depends on which of the two messages the gateway reads first.
        scoring, work = (
            asyncio.create_task(service.scorer.score(items("ab"))),
            asyncio.create_task(slow.work()),
        )
        await asyncio.wait({scoring, work}, timeout=120, return_when=asyncio.FIRST_COMPLETED)
        clock.advance(30.0)
        (score,) = await scoring
        assert score.reward == 2.0
        await ended(client, work)
        await slow.close()


async def test_a_client_that_never_answers_costs_its_items_their_time_alone(clock: ManualClock) -> None:
    async with run(wait_for_s=1000.0) as service, asyncio.timeout(120):
        silent = RawClient(service.address)
        await silent.hello(window=4)
        client = service.attach()
        await service.clients(2)
        scoring = asyncio.create_task(service.scorer.score(items(*["a"] * 32)))
        assert len(await silent.work()) == 4
        while len(service.scorer.gateway._pending) > 4:  # noqa: ASYNC110  a test's own look
            await asyncio.sleep(0.01)
        clock.advance(30.0)
        assert {score.reward for score in await scoring} == {1.0}
        # No time passes: an item that the silent client were given would never be answered.
        assert {score.reward for score in await service.scorer.score(items(*["a"] * 32))} == {1.0}
        await ended(client)
        await silent.close()


async def test_without_a_client_an_item_waits_and_then_has_an_error() -> None:
    async with run(wait_for_s=0.3) as service:
        (score,) = await service.scorer.score(items("a"))
        assert score.error is not None
        assert score.error[0].value == "unavailable"
        assert score.error[1].startswith("judge: no client is attached here; if the run has several servers")


async def test_only_items_of_its_data_sources_go_to_a_client() -> None:
    async with run(wait_for_s=0.5) as service:
        client = service.attach(data_sources=["gsm8k"])
        await service.clients(1)
        scores = await service.scorer.score(items("a", data_source="gsm8k") + items("a", data_source="code"))
        assert [score.reward for score in scores] == [1.0, None]
        assert scores[1].error is not None
        assert "none of the 1 attached clients takes the data source 'code'" in scores[1].error[1]
        await ended(client)
