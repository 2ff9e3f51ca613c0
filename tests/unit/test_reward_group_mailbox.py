"""Groups of samples through the mailbox of the reward service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from paceline.broker import Mailbox, Outgoing, names
from paceline.core.errors import InvalidMessageError, RewardErrorKind
from paceline.core.samples.trajectory import GroupRefusal, ScoredHeader
from paceline.core.scoring import ScoreItem
from paceline.reward.consumer import Consumer, ConsumerOptions
from paceline.reward.scoring.scores import Score, failed
from paceline.wire import (
    decode_scored,
    decode_trajectory_header,
    decode_trajectory_headers,
    encode_trajectory_group,
)
from support.memory_broker import MemoryBroker
from support.trajectories import finished_sample

RUN = "run-1"


class Letters:
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(96 + token) for token in token_ids)


class Recorder:
    """Scores by the number of siblings; times out for a response `slow` as often as `times` says."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[str, str]]] = []
        self.times = 0
        self.asked = asyncio.Event()
        self.wait: asyncio.Event | None = None

    async def score(self, given: Sequence[ScoreItem], *, run_id: str, step: int) -> list[Score]:
        self.calls.append([(item.group, item.response) for item in given])
        self.asked.set()
        if self.wait is not None:
            await self.wait.wait()
        return [self._score(item, given) for item in given]

    def _score(self, item: ScoreItem, given: Sequence[ScoreItem]) -> Score:
        if item.response == "slow" and self.times:
            self.times -= 1
            return failed(item.trajectory_id, RewardErrorKind.TIMEOUT, "too slow")
        if item.response == "bad":
            return failed(item.trajectory_id, RewardErrorKind.RAISED, "bad")
        siblings = sum(other.group == item.group for other in given)
        return Score(trajectory_id=item.trajectory_id, reward=float(siblings))


def group_message(prompt_id: int, *responses: str) -> Outgoing:
    samples = [
        finished_sample(RUN, prompt_id, [ord(letter) - 96 for letter in word], sample_index=index)
        for index, word in enumerate(responses)
    ]
    headers = [decode_trajectory_header(sample.payload) for sample in samples]
    blobs = {key: blob for sample in samples for key, blob in sample.blobs.items()}
    return Outgoing(stream=samples[0].stream, payload=encode_trajectory_group(headers), blobs=blobs)


class Bench:
    def __init__(self) -> None:
        self.broker, self.scorer = MemoryBroker(), Recorder()

    @asynccontextmanager
    async def working(self, member_id: str = "reward-0", **options: Any) -> AsyncIterator[None]:
        settings = ConsumerOptions(run_id=RUN, member_id=member_id, **options)
        consumer = Consumer(
            broker=self.broker,
            scorer=self.scorer,
            tokenizer=Letters(),
            options=settings,  # type: ignore[arg-type]
        )
        task = asyncio.create_task(consumer.run())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def answers(self, count: int) -> list[ScoredHeader | GroupRefusal]:
        read: list[ScoredHeader | GroupRefusal] = []
        async with Mailbox(self.broker, names.scored(RUN), names.CONTROLLER_GROUP, "controller") as box:
            async with asyncio.timeout(120):
                while len(read) < count:
                    entries = await box.take()
                    read += [decode_scored(entry.payload) for entry in entries]
                    await box.done(entries)
            await asyncio.sleep(0.05)
            assert await box.take(block_s=0.05) == []
        return read

    async def outcomes(self, count: int) -> dict[str, object]:
        headers = [answer for answer in await self.answers(count) if isinstance(answer, ScoredHeader)]
        return {
            str(header.trajectory_id): header.reward_error[0] if header.reward_error else header.reward
            for header in headers
        }


async def test_a_group_is_scored_in_one_call_whatever_the_deliveries_hold() -> None:
    bench = Bench()
    await bench.broker.append(
        [group_message(1, "a", "b", "c"), finished_sample(RUN, 9, [1]), group_message(2, "a")]
    )
    async with bench.working(max_entries=1):
        outcomes = await bench.outcomes(5)
    assert outcomes == {
        "train:4:1:0": 3.0, "train:4:1:1": 3.0, "train:4:1:2": 3.0, "train:4:9:0": 1.0, "train:4:2:0": 1.0,
    }  # fmt: skip
    # Deliveries are scored beside one another: the calls come in any order.
    groups = sorted(sorted({group for group, _ in call}) for call in bench.scorer.calls)
    assert groups == [[""], ["train:4:1"], ["train:4:2"]]


async def test_a_member_that_failed_for_now_has_its_group_scored_again_as_one() -> None:
    bench = Bench()
    bench.scorer.times = 1
    await bench.broker.append([group_message(1, "a", "slow"), group_message(2, "b", "bad")])
    async with bench.working():
        outcomes = await bench.outcomes(4)
    assert outcomes == {
        "train:4:1:0": 2.0, "train:4:1:1": 2.0, "train:4:2:0": 2.0, "train:4:2:1": "raised",
    }  # fmt: skip
    assert [[word for _, word in call] for call in bench.scorer.calls] == [
        ["a", "slow", "b", "bad"], ["a", "slow"],
    ]  # fmt: skip


async def test_a_member_that_fails_for_good_leaves_its_siblings_their_scores() -> None:
    bench = Bench()
    bench.scorer.times = 9
    await bench.broker.append([group_message(1, "a", "slow", "b")])
    async with bench.working(max_deliveries=2):
        outcomes = await bench.outcomes(3)
    assert outcomes == {"train:4:1:0": 3.0, "train:4:1:1": "timeout", "train:4:1:2": 3.0}
    assert len(bench.scorer.calls) == 2


async def test_a_group_whose_service_died_is_scored_as_one_by_another() -> None:
    bench = Bench()
    bench.scorer.wait = asyncio.Event()
    await bench.broker.append([group_message(1, "a", "b", "c")])
    async with bench.working("reward-0", lease_s=0.5):
        async with asyncio.timeout(120):
            await bench.scorer.asked.wait()
    bench.scorer.wait = None
    async with bench.working("reward-1", lease_s=0.5):
        outcomes = await bench.outcomes(3)
    assert set(outcomes.values()) == {3.0}
    assert [len(call) for call in bench.scorer.calls] == [3, 3]


async def test_a_member_that_cannot_be_read_leaves_its_siblings_their_scores() -> None:
    bench = Bench()
    message = group_message(1, "a", "b")
    blobs = dict(list((message.blobs or {}).items())[1:])
    await bench.broker.append([Outgoing(stream=message.stream, payload=message.payload, blobs=blobs)])
    async with bench.working():
        outcomes = await bench.outcomes(2)
    assert outcomes == {"train:4:1:0": "lost", "train:4:1:1": 1.0}


async def test_a_group_of_which_a_header_cannot_be_read_is_refused_with_its_prompt() -> None:
    first, other = (decode_trajectory_header(finished_sample(RUN, prompt, [1]).payload) for prompt in (1, 2))
    mixed = encode_trajectory_group([first, other])
    with pytest.raises(InvalidMessageError, match="one of another group, or one twice"):
        decode_trajectory_headers(mixed)
    with pytest.raises(InvalidMessageError, match="one of another group, or one twice"):
        decode_trajectory_headers(encode_trajectory_group([first, first]))
    bench = Bench()
    await bench.broker.append([Outgoing(stream=names.trajectories(RUN), payload=mixed)])
    async with bench.working():
        (refusal,) = await bench.answers(1)
    assert isinstance(refusal, GroupRefusal)
    assert (refusal.prompt_id, refusal.reason) == (1, "inconsistent")
