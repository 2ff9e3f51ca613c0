"""Clients that attach to a reward service, well-behaved or not, over real gRPC."""

from __future__ import annotations

import asyncio
import math
import shutil
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cli.certificates import Authority
from paceline.config.reward import AttachedConfig
from paceline.core.attached_clients.attachment import (
    MAX_WINDOW,
    Answers,
    FromClient,
    Hello,
    Leave,
    ToClient,
    Welcome,
    Window,
    Work,
)
from paceline.core.errors import (
    ConfigError,
    InvalidMessageError,
    PacelineError,
    PeerLostError,
    ProtocolError,
    RewardError,
    RewardErrorKind,
)
from paceline.core.scoring import MAX_ITEMS_PER_CALL, ScoreItem, ScoreResult
from paceline.reward.attached.scorer import AttachedScorer
from paceline.reward.attached.servicer import GatewayServicer
from paceline.reward.scoring.cached import Cached
from paceline.rpc.v1 import reward_pb2, reward_pb2_grpc
from paceline.sdk import RewardAttachment
from paceline.sdk.attached import attachment
from paceline.service.attach.gateway import Gateway, GatewayOptions
from paceline.service.grpc import channels
from paceline.service.grpc.server import start_server
from paceline.service.identity import tokens
from paceline.service.identity.credentials import Credentials, TlsFiles
from paceline.wire.calls.attachment import SCORER_MESSAGES, GroupAnswer
from support.clocks import ManualClock


def items(*responses: str, data_source: str = "") -> list[ScoreItem]:
    return [
        ScoreItem(
            trajectory_id=f"t{index}", prompt="", response=response, ground_truth="", data_source=data_source
        )
        for index, response in enumerate(responses)
    ]


def length(response: str, ground_truth: str) -> float:
    return float(len(response))


@dataclass
class Run:
    """A gateway that serves, with its one scorer."""

    scorer: AttachedScorer
    address: str
    server: Any

    def attach(self, function: Callable[..., Any] = length, **options: Any) -> asyncio.Task[None]:
        attachment = RewardAttachment(function, address=self.address, name="judge", **options)
        return asyncio.create_task(attachment.run())

    async def clients(self, number: int) -> None:
        async with asyncio.timeout(120):
            while self.scorer.gateway.num_clients != number:  # noqa: ASYNC110  a test's own look
                await asyncio.sleep(0.01)


@asynccontextmanager
async def run(
    *,
    timeout_s: float = 30.0,
    wait_for_s: float = 30.0,
    weight: float = 1.0,
    token: str = "",
    port: int = 0,
    host: str = "127.0.0.1",
    credentials: Credentials | None = None,
) -> AsyncIterator[Run]:
    config = AttachedConfig(name="judge", weight=weight, timeout_s=timeout_s, wait_for_s=wait_for_s)
    scorer = AttachedScorer(config, timeout_s=1.0, run_id="run-1")
    servicer = GatewayServicer()
    servicer.gateways = {"judge": scorer.gateway}
    add: Callable[..., None] = reward_pb2_grpc.add_RewardGatewayServicer_to_server
    credentials = credentials or Credentials(token=token)
    server = await start_server(add, servicer, host=host, port=port, credentials=credentials)
    await scorer.start()
    try:
        yield Run(scorer, server.address, server)
    finally:
        await scorer.close()
        await server.stop(grace_s=0)


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


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The addresses that the name `reward` stands for; it is looked up often."""
    hosts: set[str] = set()

    async def look_up(loop: Any, host: str, port: int, **_: Any) -> list[Any]:
        assert host == "reward"
        if not hosts:
            raise socket.gaierror("no such name")
        other = (socket.AF_INET6, 0, 0, "", ("::1", port, 0, 0))
        return [*((socket.AF_INET, 0, 0, "", (each, port)) for each in sorted(hosts)), other]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", look_up)
    monkeypatch.setattr(attachment, "_LOOK_UP_EVERY_S", 0.02)
    return hosts


async def test_a_client_attaches_to_every_address_of_a_name(listed: set[str]) -> None:
    """To one that comes later, too; one that goes away does no harm; the run's end ends the client."""
    async with run() as first:
        port = int(first.address.rpartition(":")[2])
        client = RewardAttachment(length, address=f"reward:{port}", name="judge", every_address=True)
        running = asyncio.create_task(client.run())
        await asyncio.sleep(0)
        assert not client.is_attached
        listed |= {"127.0.0.1"}
        await first.clients(1)
        async with run(port=port, host="127.0.0.2") as second:
            listed |= {"127.0.0.2"}
            await second.clients(1)
            assert first.scorer.gateway.num_clients == 1  # no stream twice
            for service in (first, second):
                assert [score.reward for score in await service.scorer.score(items("a", "bb"))] == [1.0, 2.0]
        listed -= {"127.0.0.2"}
        async with asyncio.timeout(120):
            while len(client._clients) > 1:  # noqa: ASYNC110  a test's own look
                await asyncio.sleep(0.01)
        assert client.is_attached
        assert [score.reward for score in await first.scorer.score(items("ccc"))] == [3.0]
        async with run(port=port, host="127.0.0.2") as second:  # under the address of the one that went
            listed |= {"127.0.0.2"}
            await second.clients(1)
            await second.scorer.gateway.close(Leave(reason="the run is over", for_good=True))
            await first.scorer.gateway.close(Leave(reason="the run is over", for_good=True))
            async with asyncio.timeout(120):
                await running


async def test_a_server_that_is_still_asked_is_not_left_when_its_name_is_unknown_for_a_while(
    listed: set[str],
) -> None:
    async with run() as service:
        listed |= {"127.0.0.1"}
        port = service.address.rpartition(":")[2]
        client = RewardAttachment(length, address=f"reward:{port}", name="judge", every_address=True)
        running = asyncio.create_task(client.run())
        await service.clients(1)
        async with asyncio.timeout(120):
            while not client.is_attached:  # noqa: ASYNC110  the service has let it in; the client hears of it later
                await asyncio.sleep(0.01)
        (stream,) = service.scorer.gateway._streams
        listed.clear()
        for response in "abcdef":
            await asyncio.sleep(0.03)
            assert [score.reward for score in await service.scorer.score(items(response))] == [1.0]
        assert list(service.scorer.gateway._streams) == [stream]
        client.stop()
        async with asyncio.timeout(120):
            await running


async def test_a_name_without_an_address_ends_the_client_after_its_patience(listed: set[str]) -> None:
    client = RewardAttachment(length, address="reward:7000", name="judge", every_address=True, patience_s=0.1)
    with pytest.raises(PeerLostError, match="reward:7000 has not resolved to any address for 0.1 s"):
        await client.run()


async def test_a_client_of_a_name_that_is_refused_says_so(listed: set[str]) -> None:
    async with run(token="secret") as service:
        listed |= {"127.0.0.1"}
        port = service.address.rpartition(":")[2]
        client = RewardAttachment(
            length, address=f"reward:{port}", name="judge", every_address=True, token="wrong"
        )
        with pytest.raises(ConfigError, match="refused the token"):
            await client.run()


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


async def ended(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class RawClient:
    """Says what a test wants it to say."""

    def __init__(self, address: str, token: str = "") -> None:
        self._channel = channels.connect(address, credentials=Credentials(token=token))
        self._says: asyncio.Queue[FromClient[GroupAnswer] | None] = asyncio.Queue()
        attach = reward_pb2_grpc.RewardGatewayStub(self._channel).Attach
        self.hears = channels.duplex(attach, self._messages(), phase="ATTACH", peer="gateway")

    async def _messages(self) -> AsyncIterator[reward_pb2.ScorerMessage]:
        while (message := await self._says.get()) is not None:
            yield SCORER_MESSAGES.client_to_proto(message)

    def say(self, message: FromClient[GroupAnswer] | None) -> None:
        self._says.put_nowait(message)

    async def next(self) -> ToClient[ScoreItem]:
        async with asyncio.timeout(120):
            return SCORER_MESSAGES.server_from_proto(await anext(self.hears))

    async def hello(self, *, window: int = 16) -> None:
        self.say(Hello(name="judge", client="raw", window=window))
        assert isinstance(await self.next(), Welcome)

    async def work(self) -> list[tuple[int, ScoreItem]]:
        message = await self.next()
        assert isinstance(message, Work), message
        return list(message.tasks)

    async def close(self) -> None:
        await self._channel.close()


def answer(ticket: int, item: ScoreItem, reward: float = 7.0) -> tuple[int, ScoreResult]:
    return ticket, ScoreResult(trajectory_id=item.trajectory_id, reward=reward)


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
