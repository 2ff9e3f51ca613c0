"""The reward service's mailbox work against a broker in memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import msgpack
import pytest

from paceline.broker import Mailbox, Outgoing, names
from paceline.core.errors import (
    EXIT_FAILED,
    GIVEN_ERRORS,
    InvalidMessageError,
    PacelineError,
    RewardError,
    RewardErrorKind,
    exit_code,
)
from paceline.core.ids import Purpose
from paceline.core.samples.episode import EpisodeOutcome
from paceline.core.samples.trajectory import GroupRefusal, ScoredHeader
from paceline.core.scoring import ScoreItem
from paceline.reward.consumer import Consumer, ConsumerOptions
from paceline.reward.scoring.scores import Score, failed
from paceline.wire import (
    blob_digest,
    decode_scored,
    decode_trajectory_header,
    encode_trajectory_header,
)
from support.memory_broker import MemoryBroker, MemoryStore
from support.trajectories import POLICY, finished_sample

RUN = "run-1"
EPISODE = EpisodeOutcome(stop_reason="answered", num_turns=2, num_tool_calls=1, tool_s=0.5)


class Letters:
    """Token 1 is "a", 2 is "b", ...; 0 is special, 99 is `special`."""

    special = "?"

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if max(token_ids) > 2**20:
            raise OverflowError("out of range integral type conversion attempted")
        letters = {token: chr(96 + token) for token in token_ids} | {99: self.special}
        return "".join("" if token == 0 and skip_special_tokens else letters[token] for token in token_ids)


class Recorder:
    """Scores by length; waits or fails where the response says so, or so many times as `passing` says."""

    def __init__(self) -> None:
        self.items: list[ScoreItem] = []
        self.steps: list[tuple[str, int]] = []
        self.asked, self.release = asyncio.Event(), asyncio.Event()
        self.fail: PacelineError | None = None
        self.components: dict[str, float] = {}
        self.placed: tuple[tuple[int, float], ...] = ()
        self.fail_text = "f returned nan"
        self.passing: dict[str, int] = {}

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
        if self.passing and item.response in self.passing:
            self.passing[item.response] -= 1
            if not self.passing[item.response]:
                del self.passing[item.response]
            return failed(item.trajectory_id, RewardErrorKind.TIMEOUT, "too slow, just now")
        if item.response == "bad":
            return failed(item.trajectory_id, RewardErrorKind.NOT_FINITE, self.fail_text)
        length = float(len(item.response))
        components = self.components or {"length": length}
        return Score(
            trajectory_id=item.trajectory_id, reward=length, components=components, placed=self.placed
        )


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
        self.scorer, self.tokenizer = Recorder(), Letters()
        self.consumer = self.make_consumer("reward-0")

    def make_consumer(self, member_id: str, **options: float) -> Consumer:
        settings = ConsumerOptions(run_id=RUN, member_id=member_id, **options)  # type: ignore[arg-type]
        return Consumer(broker=self.broker, scorer=self.scorer, tokenizer=self.tokenizer, options=settings)

    @asynccontextmanager
    async def working(self, consumer: Consumer | None = None) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task((consumer or self.consumer).run())
        yield task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def scored(self, count: int) -> list[bytes]:
        payloads: list[bytes] = []
        async with Mailbox(self.broker, names.scored(RUN), names.CONTROLLER_GROUP, "controller") as box:
            async with asyncio.timeout(120):
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
            finished_sample(RUN, 6, tokens("bad"), sample_index=1, num_patches=24, val_set="hard"),
        ]
    )
    async with bench.working():
        first, second = await bench.headers(2)
        await settle()
    assert str(first.trajectory_id) == "train:4:5:0"
    assert (first.num_patches, second.num_patches) == (0, 24)
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
    assert bench.scorer.items[1].val_set == "hard"
    assert bench.scorer.steps == [(RUN, 4)]
    assert bench.consumer.num_in_flight == 0
    assert await bench.pending() == 0


@pytest.mark.parametrize(("of", "is_scored"), [(5, True), (6, False)])
async def test_a_digest_without_a_name_is_checked_as_blake2b(bench: Bench, of: int, is_scored: bool) -> None:
    samples = {number: finished_sample(RUN, number, tokens("abc")) for number in (5, 6)}
    (blob,) = samples[of].blobs.values()  # type: ignore[union-attr]
    header = replace(decode_trajectory_header(samples[5].payload), blob_digest=blob_digest(blob, like=""))
    await bench.broker.append([replace(samples[5], payload=encode_trajectory_header(header))])
    async with bench.working():
        (scored,) = await bench.headers(1)
    assert (scored.reward == 3.0) is is_scored
    assert (scored.reward_error is None) is is_scored


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
        (2, "cannot be read: its digest is not the header's"),
        (3, "cannot be read: its digest is not the header's"),
        (4, "cannot be read: out of range"),
    ):
        error = headers[prompt_id].reward_error
        assert error is not None
        assert error[0] == ("lost" if prompt_id == 1 else "unavailable")
        assert sentence in error[1]
    assert [item.response for item in bench.scorer.items] == ["abcd"]
    assert await bench.pending() == 0


async def test_an_error_that_may_pass_is_tried_again_with_the_next_delivery(bench: Bench) -> None:
    bench.scorer.passing = {"slow": 2, "never": 99}
    consumer = bench.make_consumer("reward-0", lease_s=1.5, max_deliveries=3)
    words = ["slow", "fine", "never", "bad"]
    await bench.broker.append([finished_sample(RUN, i, tokens(word)) for i, word in enumerate(words)])
    async with bench.working(consumer):
        headers = {header.trajectory_id.prompt_id: header for header in await bench.headers(4)}
        await settle()
    assert [headers[i].reward for i in range(4)] == [4.0, 4.0, None, None]
    assert headers[2].reward_error == ("timeout", "too slow, just now")
    assert headers[3].reward_error == ("not_finite", "f returned nan")
    asked = [item.response for item in bench.scorer.items]
    assert {word: asked.count(word) for word in words} == {"slow": 3, "fine": 1, "never": 3, "bad": 1}
    assert consumer.num_in_flight == 0
    assert await bench.pending() == 0


async def test_a_header_that_cannot_be_read_drops_its_group_if_that_is_known(bench: Bench) -> None:
    sample = finished_sample(RUN, 7, tokens("a"))
    torn = msgpack.packb({**msgpack.unpackb(sample.payload), "seconds": "many"})
    await bench.broker.append([Outgoing(stream=names.trajectories(RUN), payload=torn)])
    async with bench.working():
        (payload,) = await bench.scored(1)
        await settle()
    refusal = decode_scored(payload)
    assert isinstance(refusal, GroupRefusal)
    assert (refusal.run_id, refusal.step, refusal.purpose, refusal.prompt_id) == (RUN, 4, Purpose.TRAIN, 7)
    assert (refusal.policy, refusal.reason, refusal.server_id) == (POLICY, "wrong_type", "reward-0")
    assert "seconds is a str, wanted a number" in refusal.message
    assert await bench.pending() == 0


class DiesBeforeTheAcknowledgement(MemoryBroker):
    """The process is gone after its results are stored, if an acknowledgement is a second command."""

    async def ack(self, stream: str, group: str, entry_ids: Sequence[str]) -> None:
        if stream == names.trajectories(RUN):
            await asyncio.sleep(3600)
        await super().ack(stream, group, entry_ids)


async def test_scores_and_acknowledgement_are_stored_together(bench: Bench) -> None:
    bench.broker = DiesBeforeTheAcknowledgement(store=bench.store)
    await bench.broker.append([finished_sample(RUN, 1, tokens("a"))])
    async with bench.working(bench.make_consumer("reward-0")):
        await bench.headers(1)
    assert await bench.pending() == 0


@pytest.mark.parametrize("kind", GIVEN_ERRORS)
async def test_what_ends_a_start_for_good_does_not_end_a_run_that_has_worked(
    bench: Bench, kind: type[PacelineError]
) -> None:
    """The launcher starts a process again that ends with this exit code."""
    bench.scorer.fail = kind("no room")
    await bench.broker.append([finished_sample(RUN, 1, tokens("a"))])
    with pytest.raises(RewardError, match="^scoring has ended: no room$") as caught:
        async with asyncio.timeout(120):
            await bench.consumer.run()
    assert exit_code(caught.value) == EXIT_FAILED


async def test_texts_with_lone_surrogates_are_escaped_and_end_nothing(bench: Bench) -> None:
    bench.scorer.fail_text = "no \udfff"
    bench.tokenizer.special = "\ud800"
    await bench.broker.append([finished_sample(RUN, 1, tokens("bad")), finished_sample(RUN, 2, [1, 99, 2])])
    async with bench.working():
        bad, odd = sorted(await bench.headers(2), key=lambda header: header.trajectory_id.prompt_id)
    assert bad.reward_error == ("not_finite", "no \\udfff")
    assert await bench.broker.get_blobs([odd.text_key]) == [b"a\\ud800b"]
    assert bench.scorer.items[-1].response == "a\\ud800b"


async def test_a_score_that_the_barrier_would_not_read_becomes_an_error(bench: Bench) -> None:
    bench.scorer.components = {f"c{index}": 1.0 for index in range(1025)}
    await bench.broker.append([finished_sample(RUN, 1, tokens("ab"))])
    async with bench.working():
        (header,) = await bench.headers(1)
    assert header.reward_error is not None
    assert header.reward_error[0] == "wrong_type"
    assert "components has 1025 items, at most 1024 are accepted" in header.reward_error[1]


async def test_a_broker_that_came_back_empty_is_read_on(bench: Bench) -> None:
    consumer = bench.make_consumer("reward-0")
    async with bench.working(consumer):
        await bench.broker.append([finished_sample(RUN, 1, tokens("ab"))])
        await bench.headers(1)
        bench.store.streams.clear()
        bench.store.blobs.clear()
        await bench.broker.append([finished_sample(RUN, 1, tokens("ab"))])
        (header,) = await bench.headers(1)
    assert header.reward == 2.0


async def test_without_saved_trajectories_no_text_is_stored(bench: Bench) -> None:
    await bench.broker.append([finished_sample(RUN, 1, tokens("ab"))])
    async with bench.working(bench.make_consumer("reward-0", save_texts=False)):
        (header,) = await bench.headers(1)
    assert header.text_key == ""
    assert list(bench.store.blobs) == [header.blob_key]


async def test_a_slow_batch_does_not_hold_up_the_next(bench: Bench) -> None:
    async with bench.working():
        await bench.broker.append([finished_sample(RUN, 1, tokens("wait"))])
        async with asyncio.timeout(120):
            await bench.scorer.asked.wait()
        await bench.broker.append([finished_sample(RUN, 2, tokens("ab"))])
        assert [header.trajectory_id.prompt_id for header in await bench.headers(1)] == [2]
        assert bench.consumer.num_in_flight == 1
        bench.scorer.release.set()
        assert [header.trajectory_id.prompt_id for header in await bench.headers(1)] == [1]


async def test_a_service_that_leaves_scores_what_it_has_and_takes_no_more(bench: Bench) -> None:
    async with bench.working() as work:
        await bench.broker.append([finished_sample(RUN, 1, tokens("wait"))])
        async with asyncio.timeout(120):
            await bench.scorer.asked.wait()
        bench.consumer.stop()
        await asyncio.sleep(1.2)  # an empty mailbox is asked for a second
        await bench.broker.append([finished_sample(RUN, 2, tokens("ab"))])
        assert not work.done()
        bench.scorer.release.set()
        assert [header.trajectory_id.prompt_id for header in await bench.headers(1)] == [1]
        await asyncio.wait_for(work, 120)
    async with bench.working(bench.make_consumer("reward-1")):
        assert [header.scorer for header in await bench.headers(1)] == ["reward-1"]


async def test_what_a_dead_service_held_is_scored_by_another(bench: Bench) -> None:
    other = bench.make_consumer("reward-1", lease_s=0.2)
    await bench.broker.append([finished_sample(RUN, 1, tokens("wait"))])
    async with bench.working(bench.make_consumer("reward-0", lease_s=0.2)):
        async with asyncio.timeout(120):
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
            async with asyncio.timeout(120):
                await task
    assert caught.group_contains(RewardError, match="no reward processes")
    assert await bench.pending() == 1


async def test_a_consumer_that_is_stopped_ends_after_the_thread_that_decodes(bench: Bench) -> None:
    began, goes_on, ended = threading.Event(), threading.Event(), threading.Event()
    decode = bench.tokenizer.decode

    def slow(token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        began.set()
        goes_on.wait(120)
        ended.set()
        return decode(token_ids, skip_special_tokens=skip_special_tokens)

    bench.tokenizer.decode = slow  # type: ignore[method-assign]
    await bench.broker.append([finished_sample(RUN, 1, tokens("ab"))])
    async with bench.working() as work:
        assert await asyncio.to_thread(began.wait, 60)
        asyncio.get_running_loop().call_later(0.1, goes_on.set)
        work.cancel()
        await asyncio.wait([work])
        assert ended.is_set()
    assert await bench.pending() == 1


async def test_parts_of_a_reward_go_to_the_tokens_with_their_steps_last_characters(bench: Bench) -> None:
    bench.tokenizer.special = "xyz"  # one token of three characters
    bench.scorer.placed = ((2, 0.5), (3, 0.25), (4, 1.0))
    mask = [1, 1, 0, 1, 1, 1, 1]
    await bench.broker.append(
        [
            finished_sample(RUN, 5, [1, 0, 99, 3, 0]),
            finished_sample(RUN, 6, [*tokens("abx"), 0, *tokens("c"), 99], mask=mask[:6], episode=EPISODE),
        ]
    )
    async with bench.working():
        single, episode = await bench.headers(2)
        await settle()
    assert [item.response for item in bench.scorer.items] == ["axyzc", "cxyz"]
    assert single.token_rewards == ((2, 1.75),)
    assert episode.token_rewards == ((5, 1.75),)


async def test_of_an_episode_the_last_answer_is_scored_and_all_of_it_is_kept(bench: Bench) -> None:
    mask = [1, 1, 0, 0, 1, 1, 1]
    await bench.broker.append([finished_sample(RUN, 5, tokens("abxycde"), mask=mask, episode=EPISODE)])
    async with bench.working():
        (header,) = await bench.headers(1)
        await settle()
    assert bench.scorer.items[0].response == "cde"
    assert header.episode == EPISODE
    (text,) = await bench.broker.get_blobs([header.text_key])
    assert text is not None
    assert text.decode() == "ab\u27e6xy\u27e7cde"


async def test_scores_of_held_out_prompts_go_to_the_validation_of_their_version(bench: Bench) -> None:
    """With validation servers, and only then."""
    samples = [
        finished_sample(RUN, 5, tokens("abc")),
        finished_sample(RUN, 6, tokens("ab"), purpose=Purpose.VALIDATE),
    ]
    await bench.broker.append(samples)
    beside = names.val_scored(RUN, POLICY.version)
    async with bench.working(bench.make_consumer("reward-0", reports_beside=True)):
        (trained,) = await bench.headers(1)
        answered = await bench.broker.read_log(beside, after="0-0", max_entries=9, block_s=60)
        assert trained.trajectory_id.prompt_id == 5
        assert [scored_header(entry.payload).trajectory_id.prompt_id for entry in answered] == [6]
    await bench.broker.append(samples)
    async with bench.working():
        assert {header.trajectory_id.prompt_id for header in await bench.headers(2)} == {5, 6}
