"""How many prompt groups a rollout server takes: while it serves, while it drains, from an empty broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from paceline.broker import names
from paceline.core.errors import (
    IllegalTransitionError,
)
from paceline.core.members import RolloutState
from paceline.rollout.engines.base import Sample, SampleRequest, do_nothing
from support.fake_engine import FakeEngine
from support.memory_broker import MemoryBroker, MemoryStore
from support.rollout_bench import LIMITS, RUN, V0, V1, bench, group


async def test_groups_are_taken_until_the_engine_is_full_and_again_as_they_end() -> None:
    async with bench() as b:
        await b.push(V0)
        b.engine.hold()
        await b.ask(*(group(p) for p in range(10)))
        await b.quiet(4)
        await asyncio.sleep(0.05)
        assert b.server.in_flight == 16
        assert len(b.engine.named("generate")) == 4
        b.engine.release()
        await b.headers(40)
        assert b.engine.max_under_way == 16
        assert await b.left_over(0) == 0


class Stragglers(FakeEngine):
    """All samples of a group end at once but the last, which waits for `release`."""

    async def generate(
        self, requests: Sequence[SampleRequest], ended: Callable[[], None] = do_nothing
    ) -> list[Sample]:
        for _ in requests[1:]:
            ended()
        samples = await super().generate(requests)
        ended()
        return samples


async def test_samples_that_end_make_room_before_their_groups_do() -> None:
    async with bench(engine=Stragglers()) as b:
        await b.push(V0)
        b.engine.hold()
        await b.ask(*(group(p) for p in range(10)))
        await b.quiet(10)
        assert b.server.in_flight == 10
        b.engine.release()
        await b.headers(40)
        assert b.server.in_flight == 0


async def test_nothing_more_is_begun_while_the_mailbox_has_no_room() -> None:
    async with bench(limits=replace(LIMITS, max_stream_length=4)) as b:
        await b.push(V0)
        await b.ask(*(group(p) for p in range(30)))
        async with asyncio.timeout(120):
            # With a full mailbox nothing is delivered, and samples under way only become more.
            while await b.broker.length(names.trajectories(RUN)) < 4 or b.server.in_flight < 16:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        # At most an engine's worth handed on, one that waits for room, and one that was begun when nothing
        # waited yet.
        assert len(b.engine.named("generate")) <= 12
        assert 16 <= b.server.in_flight <= 32
        await b.headers(120)
        async with asyncio.timeout(120):
            while b.server.in_flight:  # noqa: ASYNC110 - it has no event for it
                await asyncio.sleep(0.01)


async def test_at_most_so_many_groups_as_configured() -> None:
    async with bench(limits=replace(LIMITS, num_groups=2)) as b:
        await b.push(V0)
        b.engine.hold()
        await b.ask(*(group(p, samples=1) for p in range(5)))
        await b.quiet(2)
        await asyncio.sleep(0.05)
        assert b.server.in_flight == 2
        b.engine.release()
        await b.headers(5)


async def test_a_drained_server_finishes_what_no_other_can_go_on_with_and_begins_no_more() -> None:
    async with bench(engine=FakeEngine(continues=False)) as b:
        await b.push(V0)
        b.engine.hold()
        await b.ask(group(1))
        await b.quiet(1)
        draining = asyncio.create_task(b.server.drain())
        await asyncio.sleep(0.05)
        assert b.changes[-2:] == ["serving", "draining"]
        assert b.server.standing.policy == V0
        await b.ask(group(2))
        b.engine.release()
        await asyncio.wait_for(draining, 120)
        headers = await b.headers(4)
        assert {h.trajectory_id.prompt_id for h in headers} <= {1, 2}
        assert b.engine.named("abort") == []
        num_begun = len(b.engine.named("generate"))
        await b.ask(group(3))
        await asyncio.sleep(0.05)
        assert len(b.engine.named("generate")) == num_begun
        for order in (b.server.receive(1, 1), b.server.commit(V1)):
            with pytest.raises(IllegalTransitionError, match="a rollout server that is draining has no move"):
                await order
        await b.server.forget()
        assert b.server.standing.state is RolloutState.DRAINING


async def test_a_drained_server_that_is_full_begins_nothing_when_room_comes() -> None:
    async with bench(engine=FakeEngine(continues=False)) as b:
        await b.push(V0)
        b.engine.hold()
        await b.ask(*(group(p) for p in range(6)))
        await b.quiet(4)
        draining = asyncio.create_task(b.server.drain())
        await asyncio.sleep(0.01)
        b.engine.release()
        await asyncio.wait_for(draining, 120)
        assert len(b.engine.named("generate")) == 4
        await b.headers(16)
        assert await b.left_over(0) == 2


async def test_what_a_draining_server_takes_last_goes_back_at_once() -> None:
    async with bench() as b:
        await b.push(V0)
        await asyncio.sleep(0.01)
        draining = asyncio.create_task(b.server.drain())
        await asyncio.sleep(0.01)
        await b.ask(group(1))
        await asyncio.wait_for(draining, 120)
        assert b.engine.named("generate") == []
        assert await b.left_over(0) == 1


async def test_a_broker_that_came_back_empty_is_read_on() -> None:
    store = MemoryStore()
    async with bench(broker=MemoryBroker(store=store)) as b:
        await b.push(V0)
        b.engine.hold()
        await b.ask(group(1))
        await b.quiet(1)
        store.streams.clear()
        store.blobs.clear()
        await asyncio.sleep(0.05)
        # The controller issues the step's prompts again.
        await b.broker.ensure_group(names.prompts(RUN, 0), names.ROLLOUT_GROUP)
        await b.ask(group(1), group(2))
        b.engine.release()
        headers = await b.headers(12)
        drawn = [(h.trajectory_id.prompt_id, h.trajectory_id.sample_index) for h in headers]
        assert {key: drawn.count(key) for key in drawn} == {
            (prompt, index): 3 - prompt for prompt in (1, 2) for index in range(4)
        }
        assert await b.left_over(0) == 0
