"""A rollout server through pushes, orders and deaths: which policy it serves, and when it stops or ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.broker import Outgoing, names
from paceline.core.errors import (
    IllegalTransitionError,
    NumericsError,
    PeerLostError,
    ProtocolError,
    VersionMismatchError,
    WeightSyncError,
)
from paceline.core.members import EnginePart, RolloutState
from paceline.core.policy import PolicyTag, range_fault
from paceline.core.samples.trajectory import PromptGroup
from paceline.rollout import app
from paceline.rollout.server import RolloutServer
from paceline.service.member.runtime import ServiceContext
from paceline.wire import encode_prompt_group
from support.memory_broker import MemoryBroker
from support.rollout_bench import LIMITS, RUN, V0, V1, Bench, bench, group, weight_group_spec


async def test_nothing_is_taken_before_a_push_and_everything_of_its_version_after() -> None:
    async with bench() as b:
        await b.ask(group(1), group(2), group(3, V1))
        await asyncio.sleep(0.05)
        assert b.engine.named("generate") == []
        await b.push(V0)
        headers = await b.headers(8)
        assert sorted((h.trajectory_id.prompt_id, h.trajectory_id.sample_index) for h in headers) == [
            (p, i) for p in (1, 2) for i in range(4)
        ]
        assert {h.policy for h in headers} == {V0}
        assert b.engine.named("generate") == [(5, 1), (5, 2)]
        assert await b.left_over(0) == 0
        assert await b.left_over(1) == 1
        assert b.changes == ["stale", "syncing", "syncing", "serving"]


async def test_a_push_aborts_what_is_under_way_before_it_receives() -> None:
    async with bench() as b:
        await b.push(V0)
        b.engine.hold()
        await b.ask(group(1), group(2))
        await b.quiet(2)
        assert b.server.in_flight == 8
        b.engine.events.clear()
        await b.push(V1)
        assert sorted(b.engine.events[:2]) == [("abort", (5, 1)), ("abort", (5, 2))]
        # The engine would refuse it with requests under way.
        assert b.engine.events[2:] == [("receive", 1)]
        assert b.server.in_flight == 0
        assert await b.left_over(0) == 2  # unacknowledged: they go to another server, or the step is over
        b.engine.release()
        await b.ask(group(3, V1))
        assert {h.trajectory_id.prompt_id for h in await b.headers(4)} == {3}


async def test_what_was_aborted_goes_to_another_server_at_once() -> None:
    async with bench() as b:
        await b.push(V0)
        b.engine.hold()
        await b.ask(group(1))
        await b.quiet(1)
        await b.server.receive(1, 1)
        stream = names.prompts(RUN, 0)
        taken = await b.broker.reclaim(stream, names.ROLLOUT_GROUP, "other", min_idle_s=5.0, max_entries=9)
        assert len(taken) == 1


async def test_a_push_of_another_group_or_before_joining_is_refused() -> None:
    async with bench(joined=False) as b:
        with pytest.raises(VersionMismatchError, match="weight group None, but the push is for group 1"):
            await b.server.receive(1, 0)
        assert b.server.standing.state is RolloutState.STALE
        await b.server.join(2, weight_group_spec(), 1)
        with pytest.raises(VersionMismatchError, match="weight group 2, but the push is for group 1"):
            await b.server.receive(1, 0)
        await b.push(V0, epoch=2)
        assert b.server.standing.policy == V0


async def test_a_failed_push_leaves_the_server_stale_and_out_of_the_group() -> None:
    async with bench() as b:
        await b.push(V0)
        b.engine.push_failure = WeightSyncError("shapes differ")
        with pytest.raises(WeightSyncError, match="shapes differ"):
            await b.server.receive(1, 1)
        assert b.server.standing.state is RolloutState.STALE
        assert b.server.standing.policy is None
        b.engine.push_failure = None
        await b.ask(group(1))
        await asyncio.sleep(0.05)
        assert b.engine.named("generate") == []
        with pytest.raises(VersionMismatchError):
            await b.server.receive(1, 1)
        await b.server.join(2, weight_group_spec(), 1)
        await b.push(V0, epoch=2)
        await b.headers(4)


async def test_a_repeated_commit_does_not_open_the_sampler_twice() -> None:
    async with bench() as b:
        await b.push(V0)
        await b.server.commit(V0)
        await b.ask(group(1))
        await b.headers(4)
        assert b.engine.named("generate") == [(5, 1)]
        assert b.changes[-1] == "serving"


async def test_a_forgotten_server_stops_until_the_next_push() -> None:
    async with bench() as b:
        await b.push(V0)
        await b.server.forget()
        assert b.server.standing.state is RolloutState.STALE
        await b.ask(group(1))
        await asyncio.sleep(0.05)
        assert b.engine.named("generate") == []
        await b.push(V0)
        await b.headers(4)


class AwayBroker(MemoryBroker):
    """A server that does not answer for a while: the client waits, as that of Redis does."""

    def __init__(self) -> None:
        super().__init__()
        self.here = asyncio.Event()
        self.here.set()

    async def read(self, *args: Any, **kwargs: Any) -> Any:
        await self.here.wait()
        return await super().read(*args, **kwargs)

    async def append(self, *args: Any, **kwargs: Any) -> Any:
        await self.here.wait()
        return await super().append(*args, **kwargs)

    async def release(self, *args: Any) -> None:
        await self.here.wait()
        await super().release(*args)


async def test_an_absent_broker_is_waited_for_and_does_not_hold_up_a_push() -> None:
    broker = AwayBroker()
    async with bench(broker=broker, limits=replace(LIMITS, lease_s=0.1, append_timeout_s=600.0)) as b:
        await b.push(V0)
        b.engine.hold()
        await b.ask(group(1), group(2))
        await b.quiet(2)
        broker.here.clear()
        b.engine.release()
        await asyncio.sleep(0.2)
        async with asyncio.timeout(120):
            await b.push(V1)
        broker.here.set()
        await b.ask(group(3, V1))
        assert {h.trajectory_id.prompt_id for h in await b.headers(4)} == {3}


async def test_leaving_a_group_does_not_disturb_what_is_being_drawn() -> None:
    """Newcomers get their weights in a group of their own while the others sample."""
    async with bench() as b:
        await b.push(V0)
        b.engine.hold()
        await b.ask(group(1))
        await b.quiet(1)
        await b.server.leave(1)
        assert b.server.standing.state is RolloutState.SERVING
        b.engine.release()
        await b.headers(4)
        await b.ask(group(2))
        await b.headers(4)
        assert b.engine.named("generate") == [(5, 1), (5, 2)]
        assert b.engine.named("abort") == []
        await b.server.join(2, weight_group_spec(), 1)
        await b.push(V1, epoch=2)
        await b.ask(group(1, V1))
        await b.headers(4)


async def test_who_is_described_leaves_the_group_of_a_controller_that_has_died() -> None:
    async with bench() as b:
        await b.push(V0)
        await b.server.describe()
        assert [name for name, _ in b.engine.events if name in ("join", "leave")] == ["join", "leave"]
        assert b.server.standing.state is RolloutState.SERVING
        with pytest.raises(VersionMismatchError, match="weight group None, but the push is for group 1"):
            await b.server.receive(1, 1)
        await b.server.describe()
        assert len(b.engine.named("leave")) == 1


async def test_describe_and_receive_answer_per_rank() -> None:
    async with bench(num_ranks=2) as b:
        layouts = await b.server.describe()
        assert [layout.slices[0].box.start for layout in layouts] == [(0,), (1,)]
        await b.server.join(1, weight_group_spec(), 2)
        result = await b.server.receive(1, 9)
        assert [report.slices[0].value for report in result.reports] == [9, 9]
        assert (result.num_bytes, result.transfer_ms) == (8, 2.0)


async def test_orders_are_refused_while_the_engine_loads() -> None:
    server = RolloutServer(lambda: None)
    with pytest.raises(ProtocolError, match="still loading"):
        await server.describe()


async def test_the_death_of_the_engine_ends_the_service() -> None:
    with pytest.raises(PeerLostError, match="gone"):
        async with bench() as b:
            await b.push(V0)
            b.engine.failure = PeerLostError("gone", peer="engine")
            await b.ask(group(1))
            await asyncio.sleep(120)


async def test_weights_that_give_no_numbers_end_the_service() -> None:
    with pytest.raises(NumericsError, match=r"8 prompt groups failed one after the other; .* are unusable"):
        async with bench() as b:
            await b.push(V0)
            b.engine.log_prob = float("nan")
            await b.ask(*(group(p) for p in range(8)))
            await asyncio.sleep(120)


async def test_a_model_that_is_being_copied_when_the_process_fails_is_broken_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy may take minutes, and the end of the process waits for its threads."""
    began, told = threading.Event(), []

    def copy(model: Any, service: str, *, stopped: Callable[[], bool]) -> None:
        began.set()
        deadline = time.monotonic() + 120
        while not stopped() and time.monotonic() < deadline:
            time.sleep(0.01)
        told.append(stopped())

    monkeypatch.setattr(app, "local_model", copy)
    config: Any = SimpleNamespace(model=None)
    async with asyncio.TaskGroup() as tasks:
        session: Any = SimpleNamespace(context=ServiceContext("rollout-0", tasks), poke=lambda: None)
        loading = asyncio.create_task(app.RolloutApp(session)._load(config))
        assert await asyncio.to_thread(began.wait, 120)
        loading.cancel()
        await asyncio.wait([loading])
    assert told == [True]


async def test_a_server_that_sleeps_aborts_what_is_under_way_and_draws_again_after_a_push() -> None:
    async with bench() as b:
        await b.push(V0)
        b.engine.hold()
        await b.ask(group(1))
        await b.quiet(1)
        b.engine.events.clear()
        await b.server.sleep()
        await b.server.sleep()
        assert b.engine.events[:2] == [("abort", (5, 1)), ("sleep", None)]
        assert b.server.standing.state is RolloutState.ASLEEP
        b.engine.release()
        await b.ask(group(2, V1))
        with pytest.raises(IllegalTransitionError, match="asleep has no move for ReceiveBegan"):
            await b.server.receive(1, 1)
        await b.server.wake(EnginePart.WEIGHTS)
        await b.server.receive(1, 1)
        with pytest.raises(IllegalTransitionError, match="kv_cache of the engine is asleep"):
            await b.server.commit(V1)
        await b.server.wake(EnginePart.KV_CACHE)
        await b.server.wake(EnginePart.KV_CACHE)
        await b.server.commit(V1)
        assert {h.trajectory_id.prompt_id for h in await b.headers(4)} == {2}
        assert b.engine.named("wake") == [EnginePart.WEIGHTS, EnginePart.KV_CACHE]


# --- pushes in mid-answer

MIXING = replace(LIMITS, in_flight="keep", max_staleness=1)
V2 = PolicyTag(version=2, digest="2" * 16)


def wanting(prompt_id: int, policy: PolicyTag, step: int) -> PromptGroup:
    return replace(group(prompt_id, policy), step=step)


async def asked(b: Bench, *groups: PromptGroup) -> None:
    for of in groups:
        payload = encode_prompt_group(of)
        await b.broker.append([Outgoing(stream=names.prompts(RUN, None), payload=payload)])


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
async def test_what_is_under_way_goes_on_with_new_weights_and_says_from_which_token_on(
    in_flight: str,
) -> None:
    async with bench(limits=replace(MIXING, in_flight=in_flight)) as b:
        await b.push(V0)
        b.engine.hold(2)
        await asked(b, wanting(1, V0, step=2))
        await b.quiet(1)
        await b.push(V1)
        b.engine.release()
        headers = await b.headers(4)
        assert b.engine.named("pause") == [in_flight == "recompute"]
        assert b.engine.named("abort") == []
        kinds = [kind for kind, _ in b.engine.events if kind in ("generate", "pause", "receive", "resume")]
        assert kinds == ["receive", "generate", "pause", "receive", "resume"]
        mixed = [header for header in headers if header.ranges]
        assert mixed
        for header in mixed:
            assert [(part.policy, part.first) for part in header.ranges] == [(V0, 0), (V1, 2)]
            assert range_fault(header.ranges, header.num_response_tokens) == ""
            trajectory = await b.blob(header)
            assert (trajectory.policy, trajectory.ranges) == (V0, header.ranges)


async def test_what_begins_after_a_push_is_of_its_version_though_it_was_asked_for_before() -> None:
    async with bench(limits=MIXING) as b:
        await b.push(V0)
        await b.push(V1)
        await asked(b, wanting(1, V0, step=2))
        headers = await b.headers(4)
        assert {(header.policy, header.ranges) for header in headers} == {(V1, ())}


async def test_what_is_older_than_the_bound_is_not_drawn() -> None:
    async with bench(limits=MIXING) as b:
        for policy in (V0, V1, V2):
            await b.push(policy)
        await asked(b, wanting(1, V0, step=2), wanting(2, V1, step=3))
        assert {h.trajectory_id.prompt_id for h in await b.headers(4)} == {2}
        assert await b.left_over(None) == 0


async def test_prompts_for_newer_weights_go_back_until_these_come() -> None:
    async with bench(limits=MIXING) as b:
        await b.push(V0)
        await asked(b, wanting(1, V1, step=3))
        await asyncio.sleep(0.1)
        assert b.engine.named("generate") == []
        await b.push(V1)
        assert {header.policy for header in await b.headers(4)} == {V1}


async def test_a_push_of_older_weights_aborts_what_is_under_way() -> None:
    async with bench(limits=MIXING) as b:
        await b.push(V1)
        b.engine.hold()
        await asked(b, wanting(1, V1, step=2))
        await b.quiet(1)
        await b.push(V0)
        assert b.engine.named("abort") == [(5, 1)]
        assert b.engine.named("pause") == []


async def test_after_a_push_that_failed_what_is_under_way_waits_for_the_next_one() -> None:
    async with bench(limits=MIXING) as b:
        await b.push(V0)
        b.engine.hold(2)
        await asked(b, wanting(1, V0, step=2))
        await b.quiet(1)
        b.engine.push_failure = WeightSyncError("shapes differ")
        with pytest.raises(WeightSyncError, match="shapes differ"):
            await b.server.receive(1, 1)
        b.engine.push_failure = None
        await b.server.join(2, weight_group_spec(), 1)
        await b.push(V1, epoch=2)
        b.engine.release()
        assert len(await b.headers(4)) == 4
        assert b.engine.named("abort") == []


@pytest.mark.parametrize("order", ["drain", "forget", "sleep"])
async def test_an_order_while_weights_are_awaited_gives_back_what_is_under_way(order: str) -> None:
    async with bench(limits=MIXING) as b:
        await b.push(V0)
        b.engine.hold()
        await asked(b, wanting(1, V0, step=2))
        await b.quiet(1)
        await b.server.receive(1, 1)
        await getattr(b.server, order)()
        assert b.engine.named("abort") == [(5, 1)]
        assert b.engine.named("resume") == [None]
        assert await b.left_over(None) == 1
