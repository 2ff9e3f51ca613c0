"""Prompt groups of episodes on a rollout server: what is delivered, who has room, what lost ones become."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.core.samples.trajectory import FinishReason, PromptGroup, sampled_spans
from paceline.rollout.engines.base import Engine, Sample, SampleRequest
from paceline.rollout.episodes.environment import EnvironmentLostError, EpisodeTask, TurnResult
from paceline.rollout.episodes.group import Episodes
from paceline.rollout.episodes.loop import Slot
from support import rollout_bench
from support.episodes import QUESTION, TOKENIZER, Echo, EchoSession, Script, episodes
from support.episodes import group as of_script
from support.fake_engine import FakeEngine
from support.rollout_bench import LIMITS, V0, V1, bench

VOCAB = len(TOKENIZER)


def group(prompt_id: int, **changes: Any) -> PromptGroup:
    return rollout_bench.group(prompt_id, messages=QUESTION, **changes)


class Slow(Echo):
    """Steps wait until they may."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.may = asyncio.Event()

    def session(self, task: EpisodeTask) -> EchoSession:
        environment = self

        class Waiting(EchoSession):
            async def step(self, turn: int, action: Any) -> TurnResult:
                await environment.may.wait()
                return await super().step(turn, action)

        return Waiting(self, task)


class Brief(FakeEngine):
    """An engine whose samples all end, with the token that ends a turn."""

    def sample(self, request: SampleRequest) -> Sample:
        token_ids = np.array([9, request.seed % 9 + 2, 1], np.int32)
        return Sample(
            token_ids=token_ids,
            log_probs=np.full(3, self.log_prob, np.float32),
            finish_reason=FinishReason.STOP,
        )


def with_(environment: Echo, **options: Any) -> Any:
    def make(engine: Engine) -> Episodes:
        return episodes(engine, environment, **options)

    return make


async def test_what_is_delivered() -> None:
    echo = Echo(num_steps=2)
    async with bench(engine=Brief(vocab_size=VOCAB), episodes=with_(echo)) as b:
        await b.push(V0)
        await b.ask(group(7, samples=3))
        for header in await b.headers(3):
            blob = await b.blob(header)
            assert header.episode is not None
            assert (header.episode.num_turns, header.episode.reward) == (2, 2.0)
            assert len(sampled_spans(blob.response_mask)) == 2
            assert header.num_sampled_tokens == np.count_nonzero(blob.response_mask)
            assert header.num_sampled_tokens < header.num_response_tokens == len(blob.response_token_ids)
            assert not blob.response_log_probs[blob.response_mask == 0].any()
            assert blob.response_log_probs[blob.response_mask == 1].all()
            assert blob.prompt_token_ids.tolist() == [5, 7]
        assert await b.left_over(0) == 0


async def test_a_group_without_messages_is_single_answers() -> None:
    async with bench(engine=Brief(vocab_size=VOCAB), episodes=with_(Echo())) as b:
        await b.push(V0)
        await b.ask(rollout_bench.group(7, samples=2))
        assert [header.episode for header in await b.headers(2)] == [None, None]


async def test_who_waits_for_a_tool_leaves_its_room_to_others() -> None:
    slow = Slow(num_steps=1)
    engine = Brief(vocab_size=VOCAB)
    async with bench(engine=engine, limits=replace(LIMITS, num_samples=1), episodes=with_(slow)) as b:
        await b.push(V0)
        await b.ask(*(group(i, samples=1) for i in (2, 3, 4)))
        await b.quiet(3)
        assert b.sampler.in_flight == 3
        slow.may.set()
        assert len(await b.headers(3)) == 3
        await b.ask(group(5, samples=1))
        assert len(await b.headers(1)) == 1
        assert b.sampler.in_flight == 0


async def test_open_episodes_are_bounded() -> None:
    slow = Slow(num_steps=1)
    limits = replace(LIMITS, num_samples=1, num_open=2)
    async with bench(engine=Brief(vocab_size=VOCAB), limits=limits, episodes=with_(slow)) as b:
        await b.push(V0)
        await b.ask(*(group(i, samples=1) for i in (2, 3, 4)))
        await b.quiet(2)
        await asyncio.sleep(0.05)
        assert len(b.engine.named("generate")) == 2
        slow.may.set()
        assert len(await b.headers(3)) == 3


async def test_conversations_that_do_not_fit_the_kv_cache_wait_in_order() -> None:
    slow = Slow(num_steps=1)
    # A prompt of two tokens, ten for an answer: room for one episode, and for two when its answer had three.
    options = {"max_turn_tokens": 10, "max_context_tokens": 17}
    async with bench(engine=Brief(vocab_size=VOCAB), episodes=with_(slow, **options)) as b:
        await b.push(V0)
        await b.ask(group(7, samples=5))
        await b.quiet(2)
        await b.ask(*(group(i, samples=1) for i in (8, 9, 10)))
        await asyncio.sleep(0.2)
        opened = [task.trajectory_id for kind, task in slow.events if kind == "open"]
        assert [name.rpartition(":")[2] for name in opened] == ["0", "1"]
        # Groups are left to other servers meanwhile, but for one that the server was waiting for already.
        assert b.sampler.in_flight in (5, 6)
        slow.may.set()
        assert len(await b.headers(8)) == 8
        assert b.sampler.in_flight == 0


@pytest.mark.parametrize(("spare", "is_full"), [(0, False), (-1, True)])
async def test_the_prompt_of_a_group_takes_room_once(spare: int, is_full: bool) -> None:
    slow, asked = Slow(num_steps=1), of_script(samples=3)
    # The prompt, two answers of two tokens, and ten for the third.
    room = len(asked.prompt_token_ids) + 2 * 2 + 10 + spare
    drawing = episodes(Script("a"), slow, max_turn_tokens=10, max_context_tokens=room)
    drawn = asyncio.create_task(drawing.draw(asked, "0", Slot))
    for _ in range(100):
        await asyncio.sleep(0)
    assert [kind for kind, _ in slow.events].count("open") == (2 if is_full else 3)
    assert drawing.is_full == is_full
    slow.may.set()
    assert len(await drawn) == 3
    assert not drawing.is_full


async def test_a_push_empties_the_line_too() -> None:
    slow = Slow(num_steps=1)
    options = {"max_turn_tokens": 10, "max_context_tokens": 5}
    async with bench(engine=Brief(vocab_size=VOCAB), episodes=with_(slow, **options)) as b:
        await b.push(V0)
        await b.ask(group(7, samples=3))
        await b.quiet(1)
        await b.push(V1)
        assert [kind for kind, _ in slow.events] == ["open", "abandon"]
        slow.may.set()
        await b.ask(group(9, samples=3, policy=V1))
        assert {header.trajectory_id.prompt_id for header in await b.headers(3)} == {9}


async def test_a_lost_environment_drops_its_group_with_the_reason() -> None:
    lost = EnvironmentLostError("nobody answers", peer="environment")
    echo = Echo(losses=[lost] * 99)
    limits = replace(LIMITS, lease_s=1.5)
    async with bench(engine=Brief(vocab_size=VOCAB), limits=limits, episodes=with_(echo, retries=0)) as b:
        await b.push(V0)
        await b.ask(group(7, samples=1))
        [refusal] = await b.refusals(1)
        assert (refusal.reason, refusal.deliveries) == ("environment_lost", LIMITS.max_deliveries)
        assert "nobody answers" in refusal.message
        attempts = [task.attempt for kind, task in echo.events if kind == "open"]
        assert attempts == sorted(set(attempts))
        assert len(attempts) == LIMITS.max_deliveries


async def test_a_push_abandons_episodes_and_another_draws_them_again() -> None:
    slow = Slow(num_steps=1)
    async with bench(engine=Brief(vocab_size=VOCAB), episodes=with_(slow)) as b:
        await b.push(V0)
        await b.ask(group(7, samples=2))
        await b.quiet(2)
        await b.push(V1)
        assert [kind for kind, _ in slow.events].count("abandon") == 2
        assert b.sampler.in_flight == 0
        assert await b.left_over(0) == 1
