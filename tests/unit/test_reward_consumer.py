"""The reward service's mailbox work against a broker in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from paceline.broker import Mailbox, Outgoing, names
from paceline.broker.memory import MemoryBroker, MemoryStore
from paceline.core.errors import InvalidMessageError, RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem
from paceline.core.trajectory import ScoredHeader
from paceline.reward.consumer import Consumer, ConsumerOptions
from paceline.reward.scores import Score, failed
from paceline.wire import blob_digest, decode_scored
from support.trajectories import POLICY, finished_sample

RUN = "run-1"


class Letters:
    """Token 1 is "a", 2 is "b", ...; 0 is special."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if max(token_ids) > 2**20:
            raise OverflowError("out of range integral type conversion attempted")
        return "".join("" if token == 0 and skip_special_tokens else chr(96 + token) for token in token_ids)


class Recorder:
    """Scores by length; waits or fails where the response says so."""

    def __init__(self) -> None:
        self.items: list[ScoreItem] = []
        self.steps: list[tuple[str, int]] = []
        self.asked, self.release = asyncio.Event(), asyncio.Event()
        self.fail: RewardError | None = None

    async def score(self, items: Sequence[ScoreItem], *, run_id: str, step: int) -> list[Score]:
        self.items += items
        self.asked.set()
        self.steps.append((run_id, step))
        if self.fail is not None:
            raise self.fail
        if any(item.response == "wait" for item in items):
            await self.release.wait()
        return [self._score(item) for item in items]

    def _score(self, item: ScoreItem) -> Score:
        if item.response == "bad":
            return failed(item.trajectory_id, RewardErrorKind.NOT_FINITE, "f returned nan")
        length = float(len(item.response))
        return Score(trajectory_id=item.trajectory_id, reward=length, components={"length": length})


def tokens(word: str) -> list[int]:
    return [ord(letter) - 96 for letter in word]


def scored_header(payload: bytes) -> ScoredHeader:
    header = decode_scored(payload)
    assert isinstance(header, ScoredHeader)
    return header


async def settle() -> None:
    """Lets the consumer acknowledge what it has just sent, which takes a few turns of the event loop."""
    for _ in range(20):
        await asyncio.sleep(0)


class Bench:
    """A consumer at work, and the controller's side of its mailboxes."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.broker = MemoryBroker(store=self.store)
        self.scorer = Recorder()
        self.consumer = self.make_consumer("reward-0")

    def make_consumer(self, member_id: str, **options: float) -> Consumer:
        settings = ConsumerOptions(run_id=RUN, member_id=member_id, **options)  # type: ignore[arg-type]
        return Consumer(broker=self.broker, scorer=self.scorer, tokenizer=Letters(), options=settings)

    @asynccontextmanager
    async def working(self, consumer: Consumer | None = None) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task((consumer or self.consumer).run())
        yield task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def scored(self, count: int) -> list[bytes]:
        payloads: list[bytes] = []
        async with Mailbox(self.broker, names.scored(RUN), names.CONTROLLER_GROUP, "controller") as box:
            async with asyncio.timeout(5):
                while len(payloads) < count:
                    entries = await box.take()
                    payloads += [entry.payload for entry in entries]
                    await box.done(entries)
        return payloads

    async def headers(self, count: int) -> list[ScoredHeader]:
        return [scored_header(payload) for payload in await self.scored(count)]

    async def pending(self) -> int:
        return len(
            await self.broker.reclaim(
                names.trajectories(RUN), names.REWARD_GROUP, "test", min_idle_s=0.0, max_entries=1000
            )
        )


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_a_trajectory_becomes_a_scored_header(bench: Bench) -> None:
    await bench.broker.append(
        [
            finished_sample(RUN, 5, [*tokens("abc"), 0], ground_truth="abc", extra={"level": 2}),
            finished_sample(RUN, 6, tokens("bad"), sample_index=1),
        ]
    )
    async with bench.working():
        first, second = await bench.headers(2)
        await settle()
    assert str(first.trajectory_id) == "train:4:5:0"
    assert (first.reward, first.components, first.reward_error) == (3.0, {"length": 3.0}, None)
    assert (first.run_id, first.policy, first.server_id, first.generation_s) == (
        RUN,
        POLICY,
        "rollout-0",
        0.25,
    )
    assert (first.num_prompt_tokens, first.num_response_tokens) == (3, 4)
    assert first.blob_key == names.blob(RUN, "train:4:5:0", "rollout-0", "0")
    assert (first.text_key, first.scorer) == (names.text(first.blob_key), "reward-0")
    arrays, text = await bench.broker.get_blobs([first.blob_key, first.text_key])
    assert arrays is not None
    assert first.blob_digest == blob_digest(arrays)
    assert text == b"abc"
    assert second.trajectory_id.sample_index == 1
    assert (second.reward, second.reward_error) == (None, ("not_finite", "f returned nan"))
    assert bench.scorer.items[0] == ScoreItem(
        trajectory_id="train:4:5:0",
        prompt="how many?",
        response="abc",
        ground_truth="abc",
        data_source="test",
        extra={"level": 2},
    )
    assert bench.scorer.steps == [(RUN, 4)]
    assert bench.consumer.num_in_flight == 0
    assert await bench.pending() == 0


async def test_what_cannot_be_read_is_told_and_takes_nothing_along(bench: Bench) -> None:
    lost = finished_sample(RUN, 1, tokens("a"))
    swapped, spoilt = finished_sample(RUN, 2, tokens("a")), finished_sample(RUN, 3, tokens("a"))
    huge = finished_sample(RUN, 4, [2**30])
    (swapped_key, other_blob) = (*swapped.blobs, *lost.blobs.values())  # type: ignore[misc, union-attr]
    (spoilt_key,) = spoilt.blobs  # type: ignore[misc]
    stream = names.trajectories(RUN)
    await bench.broker.append(
        [
            Outgoing(stream=stream, payload=lost.payload),
            Outgoing(stream=stream, payload=swapped.payload, blobs={swapped_key: other_blob}),
            Outgoing(stream=stream, payload=spoilt.payload, blobs={spoilt_key: b"\xc1"}),
            huge,
            Outgoing(stream=stream, payload=b"no header"),
            finished_sample(RUN, 9, tokens("abcd")),
        ]
    )
    async with bench.working():
        payloads = await bench.scored(6)
        await settle()
    # What is no header reaches the controller as it is, whose journal records the rejection.
    assert payloads[0] == b"no header"
    with pytest.raises(InvalidMessageError):
        decode_scored(payloads[0])
    headers = {header.trajectory_id.prompt_id: header for header in map(scored_header, payloads[1:])}
    assert headers[9].reward == 4.0
    for prompt_id, sentence in (
        (1, "is gone: its step is over, or the broker lost it"),
        (2, "cannot be read: it holds train:4:1:0"),
        (3, "cannot be read: invalid trajectory"),
        (4, "cannot be read: out of range"),
    ):
        error = headers[prompt_id].reward_error
        assert error is not None
        assert error[0] == "unavailable"
        assert sentence in error[1]
    assert [item.response for item in bench.scorer.items] == ["abcd"]
    assert await bench.pending() == 0


async def test_a_slow_batch_does_not_hold_up_the_next(bench: Bench) -> None:
    async with bench.working():
        await bench.broker.append([finished_sample(RUN, 1, tokens("wait"))])
        async with asyncio.timeout(5):
            await bench.scorer.asked.wait()
        await bench.broker.append([finished_sample(RUN, 2, tokens("ab"))])
        assert [header.trajectory_id.prompt_id for header in await bench.headers(1)] == [2]
        assert bench.consumer.num_in_flight == 1
        bench.scorer.release.set()
        assert [header.trajectory_id.prompt_id for header in await bench.headers(1)] == [1]


async def test_a_service_that_leaves_scores_what_it_has_and_takes_no_more(bench: Bench) -> None:
    async with bench.working() as work:
        await bench.broker.append([finished_sample(RUN, 1, tokens("wait"))])
        async with asyncio.timeout(5):
            await bench.scorer.asked.wait()
        bench.consumer.stop()
        await asyncio.sleep(1.2)  # an empty mailbox is asked for a second
        await bench.broker.append([finished_sample(RUN, 2, tokens("ab"))])
        assert not work.done()
        bench.scorer.release.set()
        assert [header.trajectory_id.prompt_id for header in await bench.headers(1)] == [1]
        await asyncio.wait_for(work, 1)
    async with bench.working(bench.make_consumer("reward-1")):
        assert [header.scorer for header in await bench.headers(1)] == ["reward-1"]


async def test_what_a_dead_service_held_is_scored_by_another(bench: Bench) -> None:
    other = bench.make_consumer("reward-1", lease_s=0.2)
    await bench.broker.append([finished_sample(RUN, 1, tokens("wait"))])
    async with bench.working(bench.make_consumer("reward-0", lease_s=0.2)):
        async with asyncio.timeout(5):
            await bench.scorer.asked.wait()
    # It ended in the middle; nothing was acknowledged, so the sample is delivered again.
    bench.scorer.release.set()
    async with bench.working(other):
        (header,) = await bench.headers(1)
    assert (header.scorer, header.reward) == ("reward-1", 4.0)
    assert await bench.pending() == 0


async def test_a_scorer_that_is_beyond_repair_ends_the_service_and_acknowledges_nothing(bench: Bench) -> None:
    bench.scorer.fail = RewardError("no reward processes", kind=RewardErrorKind.UNAVAILABLE)
    await bench.broker.append([finished_sample(RUN, 1, tokens("a"))])
    async with bench.working() as task:
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(5):
                await task
    assert caught.group_contains(RewardError, match="no reward processes")
    assert await bench.pending() == 1
