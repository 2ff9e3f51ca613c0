"""A client that attaches to a gateway, against streams of the test's own: no network, no time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from paceline.core.attached_clients.attachment import Answers, FromClient, Hello, Leave, Welcome, Work
from paceline.core.errors import PeerLostError
from paceline.sdk.attached import attachment
from paceline.service.attach import attaching
from paceline.service.attach.attaching import AttachedClient, ClientOptions
from paceline.service.member.runtime import ServiceContext
from support.clocks import ManualClock

PATIENCE_S = 10.0
WELCOME = Welcome(run_id="r", answer_within_s=60.0)
Said = AsyncIterator[FromClient[str]]


def lost() -> PeerLostError:
    return PeerLostError("the gateway is away", peer="gateway")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """The client's clock; what it waits between two streams passes at once, and is written down."""
    clock = ManualClock()
    monkeypatch.setattr(attaching, "time", clock)
    monkeypatch.setattr(attaching, "_FIRST_PAUSE_S", 0.0)
    return clock


def client(open_stream: Callable[[Said], AsyncIterator[Any]], handle: Any = None) -> AttachedClient[Any, str]:
    options = ClientOptions(
        hello=Hello(name="judge", client="c", window=4), peer="gateway", patience_s=PATIENCE_S
    )
    return AttachedClient(options, open_stream, handle)


async def test_a_gateway_that_stays_away_is_given_up_after_the_patience(clock: ManualClock) -> None:
    attempts = []

    async def away(said: Said) -> AsyncIterator[Any]:
        clock.advance(4.0)
        attempts.append(clock.monotonic())
        raise lost()
        yield

    begun = clock.monotonic()
    with pytest.raises(PeerLostError, match="the gateway is away"):
        await client(away).run()
    assert [at - begun for at in attempts] == [4.0, 8.0, 12.0]


async def test_a_welcome_begins_the_patience_anew(clock: ManualClock) -> None:
    attempts = []

    async def welcomes_twice(said: Said) -> AsyncIterator[Any]:
        clock.advance(9.0)
        attempts.append(clock.monotonic())
        if len(attempts) in (1, 3):
            yield WELCOME
            clock.advance(100.0)  # attached for longer than the patience
        raise lost()

    with pytest.raises(PeerLostError):
        await client(welcomes_twice).run()
    assert len(attempts) == 5  # welcome, away, welcome, away, and away beyond the patience


async def test_answers_that_are_ready_go_in_order_in_messages_of_a_size_and_before_the_leave() -> None:
    """All are ready at once, and the client is stopped before it has sent any."""
    count = 600
    said: list[FromClient[str]] = []

    async def answer(task: int) -> str:
        return f"answer {task}"

    async def stream(messages: Said) -> AsyncIterator[Any]:
        said.append(await anext(messages))
        yield WELCOME
        yield Work(tuple((ticket, ticket) for ticket in range(count)))
        await asyncio.sleep(0)  # all are answered now
        it.stop()
        said.extend([message async for message in messages])

    it = client(stream, answer)
    async with asyncio.timeout(120):
        await it.run()
    assert isinstance(said[0], Hello)
    answers = [message.answers for message in said if isinstance(message, Answers)]
    assert [len(part) for part in answers] == [256, 256, 88]
    assert [pair for part in answers for pair in part] == [(n, f"answer {n}") for n in range(count)]
    assert said[-1] == Leave(reason="stopped")
    assert len(said) == 5


async def test_a_gateway_that_leaves_gets_what_is_under_way_and_nothing_else() -> None:
    said: list[FromClient[str]] = []
    may_answer = asyncio.Event()

    async def answer(task: int) -> str:
        await may_answer.wait()
        return f"answer {task}"

    async def stream(messages: Said) -> AsyncIterator[Any]:
        said.append(await anext(messages))
        yield WELCOME
        yield Work(((1, 1), (2, 2)))
        yield Leave(reason="the run is over", for_good=True)
        may_answer.set()
        said.extend([message async for message in messages])

    async with asyncio.timeout(120):
        await client(stream, answer).run()
    answers = [pair for message in said[1:] if isinstance(message, Answers) for pair in message.answers]
    assert answers == [(1, "answer 1"), (2, "answer 2")]
    assert not any(isinstance(message, Leave) for message in said)


class Attached:
    """A client of which the test says whether it is attached; it runs until it is stopped."""

    def __init__(self) -> None:
        self.is_attached, self._stopped = True, asyncio.Event()

    async def run(self) -> None:
        await self._stopped.wait()

    def stop(self) -> None:
        self._stopped.set()


async def test_a_process_that_is_told_to_end_answers_on_while_a_server_is_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last step of a run that is stopped needs its reward models, too."""
    made: list[Callable[[ServiceContext], Coroutine[Any, Any, None]]] = []
    monkeypatch.setattr(attachment, "_LET_GO_EVERY_S", 0.01)
    monkeypatch.setattr(attachment, "run_service", lambda serve, **_: made.append(serve))
    client = Attached()
    attachment.attach_until_signal(lambda: client, "judge")
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        context = ServiceContext("judge", tasks)
        serving = asyncio.create_task(made[0](context))
        while context.ask_first is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        context.ask_first()
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert not context.stopping.is_set()
        client.is_attached = False
        await serving
        assert context.stopping.is_set()
        assert not context.is_over, "the client was told to end before the run was over"
