"""A rollout server over the memory broker and an engine that records what is asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import numpy as np
import pytest

from paceline.broker import names
from paceline.broker.base import Outgoing
from paceline.broker.memory import MemoryBroker, MemoryStore
from paceline.core.errors import (
    IllegalTransitionError,
    NumericsError,
    PeerLostError,
    ProtocolError,
    VersionMismatchError,
    WeightSyncError,
)
from paceline.core.ids import Purpose, sample_seed
from paceline.core.members import RolloutState
from paceline.core.policy import PolicyTag
from paceline.core.trajectory import GroupRefusal, PromptGroup, RewardContext, SamplingSpec, Trajectory
from paceline.rollout.capacity import SamplerLimits
from paceline.rollout.engines.base import Sample, SampleRequest, do_nothing
from paceline.rollout.sampler import Sampler
from paceline.rollout.server import Parts, RolloutServer
from paceline.weights.geometry.layout import RankLayout
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.wire import (
    blob_digest,
    decode_scored,
    decode_trajectory,
    decode_trajectory_header,
    encode_prompt_group,
)
from support.fake_engine import FakeEngine
from support.sequencer_run import config

RUN = "run-1"
V0 = PolicyTag(version=0, digest="0" * 16)
V1 = PolicyTag(version=1, digest="1" * 16)
LIMITS = SamplerLimits(
    num_samples=16,
    num_groups=100,
    group_timeout_s=5.0,
    lease_s=5.0,
    max_stream_length=1000,
    append_timeout_s=5.0,
    max_deliveries=3,
    probe_timeout_s=0.05,
)


@dataclass(kw_only=True, slots=True)
class Bench:
    """A server that is STALE, with all it works with."""

    broker: MemoryBroker
    engine: FakeEngine
    server: RolloutServer
    sampler: Sampler
    changes: list[str]

    async def push(self, policy: PolicyTag, *, epoch: int = 1) -> None:
        await self.server.receive(epoch, policy.version)
        await self.server.commit(policy)

    async def ask(self, *groups: PromptGroup, version: int | None = None) -> None:
        for group in groups:
            stream = names.prompts(RUN, group.policy.version if version is None else version)
            await self.broker.append([Outgoing(stream=stream, payload=encode_prompt_group(group))])

    async def headers(self, wanted: int) -> list[Any]:
        """The next trajectory headers, in order of arrival; fails where there are not so many within 5 s."""
        stream = names.trajectories(RUN)
        await self.broker.ensure_group(stream, "test")
        headers: list[Any] = []
        async with asyncio.timeout(5):
            while len(headers) < wanted:
                entries = await self.broker.read(stream, "test", "me", max_entries=100, block_s=0.5)
                await self.broker.ack(stream, "test", [entry.entry_id for entry in entries])
                headers += [decode_trajectory_header(entry.payload) for entry in entries]
        return headers

    async def refusals(self, wanted: int) -> list[GroupRefusal]:
        """The group refusals so far, at least `wanted`; fails where there are not so many within 5 s."""
        stream = names.scored(RUN)
        async with asyncio.timeout(5):
            while await self.broker.length(stream) < wanted:  # noqa: ASYNC110 - as `quiet`
                await asyncio.sleep(0.01)
        entries = await self.broker.read_log(stream, after="0-0", max_entries=100, block_s=0)
        refusals = [decode_scored(entry.payload) for entry in entries]
        return [refusal for refusal in refusals if isinstance(refusal, GroupRefusal)]

    async def blob(self, header: Any) -> Trajectory:
        [data] = await self.broker.get_blobs([header.blob_key])
        assert data is not None
        return decode_trajectory(data)

    async def left_over(self, version: int) -> int:
        """Prompt groups of a version that nobody has acknowledged; takes them away."""
        stream = names.prompts(RUN, version)
        await self.broker.ensure_group(stream, names.ROLLOUT_GROUP)
        where = (stream, names.ROLLOUT_GROUP, "inspector")
        pending = await self.broker.reclaim(*where, min_idle_s=0, max_entries=100)
        return len(pending) + len(await self.broker.read(*where, max_entries=100, block_s=0))

    async def quiet(self, count: int) -> None:
        """Returns when the engine has begun with `count` groups."""
        async with asyncio.timeout(5):
            while len(self.engine.named("generate")) < count:  # noqa: ASYNC110 - the engine has no event for it
                await asyncio.sleep(0.001)


@asynccontextmanager
async def bench(
    *,
    limits: SamplerLimits = LIMITS,
    joined: bool = True,
    num_ranks: int = 1,
    engine: FakeEngine | None = None,
    broker: MemoryBroker | None = None,
) -> AsyncIterator[Bench]:
    broker, engine = broker or MemoryBroker(), engine or FakeEngine(num_ranks=num_ranks)
    changes: list[str] = []
    try:
        async with asyncio.TaskGroup() as tasks:

            def spawn(name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
                return tasks.create_task(work, name=name)

            server = RolloutServer(lambda: changes.append(server.standing.state.value))
            sampler = Sampler(
                engine=engine,
                broker=broker,
                run_id=RUN,
                server_id="rollout-0",
                incarnation="x",
                limits=limits,
                spawn=spawn,
            )
            server.start(Parts(engine=engine, sampler=sampler, join_timeout_s=1, push_timeout_s=1))
            if joined:
                await server.join(1, weight_group_spec(), 2)
            yield Bench(broker=broker, engine=engine, server=server, sampler=sampler, changes=changes)
            await sampler.close()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


def weight_group_spec() -> WeightGroupSpec:
    """A group of one learner rank and one rollout rank, which the fake engine's ranks do not really form."""
    layout = RankLayout(dtype="float32", slices=())
    return WeightGroupSpec(
        epoch=1,
        backend="gloo",
        store_host="127.0.0.1",
        store_port=1,
        learner_layouts=(layout,),
        rollout_layouts=(layout,),
        wire_dtype="float32",
    )


def group(prompt_id: int, policy: PolicyTag = V0, *, samples: int = 4, **changes: Any) -> PromptGroup:
    made = PromptGroup(
        run_id=RUN,
        step=policy.version + 1,
        purpose=Purpose.TRAIN,
        prompt_id=prompt_id,
        prompt_token_ids=np.array([5, prompt_id], np.int32),
        sampling=SamplingSpec(temperature=1.0, max_tokens=6, stop_token_ids=(1,)),
        seeds=tuple(
            sample_seed(run_seed=0, step=1, prompt_id=prompt_id, sample_index=i) for i in range(samples)
        ),
        policy=policy,
        context=RewardContext(ground_truth=str(prompt_id)),
    )
    return replace(made, **changes)


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


async def test_headers_and_blobs_carry_what_was_drawn() -> None:
    async with bench() as b:
        await b.push(V0)
        await b.ask(group(7, samples=3))
        for header in await b.headers(3):
            blob = await b.blob(header)
            index = header.trajectory_id.sample_index
            expected = b.engine.sample(
                _request(seed=group(7).seeds[index], prompt=(5, 7), sampling=group(7).sampling)
            )
            assert blob.trajectory_id == header.trajectory_id
            assert blob.response_token_ids.tolist() == expected.token_ids.tolist()
            assert blob.response_log_probs.tolist() == [-1.0] * len(expected.token_ids)
            assert blob.response_mask.tolist() == [1] * len(expected.token_ids)
            assert blob.seed == group(7).seeds[index]
            assert (blob.policy, blob.finish_reason) == (V0, expected.finish_reason)
            assert header.server_id == "rollout-0"
            assert (header.num_prompt_tokens, header.num_response_tokens) == (2, len(expected.token_ids))
            assert header.context.ground_truth == "7"


def _request(*, seed: int, prompt: tuple[int, ...], sampling: SamplingSpec) -> SampleRequest:
    return SampleRequest(request_id="x", prompt_token_ids=prompt, sampling=sampling, seed=seed)


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


async def test_a_group_of_another_digest_is_refused_and_acknowledged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench() as b:
        await b.push(V0)
        stranger = replace(V0, digest="f" * 16)
        await b.ask(group(1, stranger), group(2))
        assert {h.trajectory_id.prompt_id for h in await b.headers(4)} == {2}
        [refusal] = await b.refusals(1)
        assert (refusal.prompt_id, refusal.policy, refusal.reason) == (1, stranger, "wrong_policy")
        assert refusal.message == "prompt 1 wants v0@ffffffffffffffff, this server holds v0@0000000000000000"
        assert (refusal.run_id, refusal.step, refusal.purpose) == (RUN, 1, Purpose.TRAIN)
        assert (refusal.server_id, refusal.deliveries) == ("rollout-0", 1)
        assert await b.left_over(0) == 0
        assert "reason=wrong_policy" in caplog.text


async def test_a_group_of_an_older_version_is_only_acknowledged() -> None:
    async with bench() as b:
        await b.push(V1)
        await b.ask(group(1, V0), version=1)
        await b.ask(group(2, V1))
        assert {h.trajectory_id.prompt_id for h in await b.headers(4)} == {2}
        assert await b.left_over(1) == 0
        assert await b.refusals(0) == []


async def test_what_cannot_be_served_is_refused_at_once_with_its_reason() -> None:
    async with bench() as b:
        await b.push(V0)
        torn = msgpack.unpackb(encode_prompt_group(group(4)))
        for payload in (b"nonsense", msgpack.packb({**torn, "seeds": "none"})):
            await b.broker.append([Outgoing(stream=names.prompts(RUN, 0), payload=payload)])
        await b.ask(group(1, prompt_token_ids=np.array([64], np.int32)))  # the vocabulary ends at 63
        await b.ask(group(2, run_id="run-2"), version=0)
        await b.ask(group(3))
        assert {h.trajectory_id.prompt_id for h in await b.headers(4)} == {3}
        refused = {(r.prompt_id, r.run_id, r.reason) for r in await b.refusals(3)}
        assert refused == {(1, RUN, "out_of_range"), (2, "run-2", "wrong_run"), (4, RUN, "wrong_type")}
        assert await b.left_over(0) == 0


async def test_a_request_that_the_engine_refuses_is_its_groups_and_nobody_elses() -> None:
    async with bench(engine=FakeEngine(max_model_len=5)) as b:
        await b.push(V0)
        await b.ask(group(1, prompt_token_ids=np.arange(6, dtype=np.int32)), group(2))
        assert {h.trajectory_id.prompt_id for h in await b.headers(4)} == {2}
        [refusal] = await b.refusals(1)
        assert (refusal.prompt_id, refusal.reason, refusal.deliveries) == (1, "refused_by_engine", 1)
        assert "the prompt is too long" in refusal.message


async def test_an_engine_error_is_the_groups_which_is_given_up_after_so_many_deliveries() -> None:
    async with bench(limits=replace(LIMITS, lease_s=0.05)) as b:
        await b.push(V0)
        b.engine.errors[(5, 3)] = RuntimeError("an illegal\ninstruction \ud800")
        await b.ask(group(3), group(4))
        assert {h.trajectory_id.prompt_id for h in await b.headers(4)} == {4}
        [refusal] = await b.refusals(1)
        assert (refusal.prompt_id, refusal.reason, refusal.deliveries) == (3, "engine_error", 3)
        assert refusal.message == "RuntimeError: an illegal instruction \\ud800"
        assert b.engine.named("generate").count((5, 3)) == 3
        assert await b.left_over(0) == 0
        await b.ask(group(5))
        await b.headers(4)


async def test_a_group_that_fails_once_gets_the_same_samples_on_its_second_delivery() -> None:
    async with bench(limits=replace(LIMITS, lease_s=0.05)) as b:
        await b.push(V0)
        b.engine.errors[(5, 3)] = PeerLostError("aborted", peer="engine")
        await b.ask(group(3))
        await b.quiet(1)
        b.engine.errors.clear()
        headers = await b.headers(4)
        assert [h.trajectory_id.sample_index for h in headers] == [0, 1, 2, 3]
        for header, seed in zip(headers, group(3).seeds, strict=True):
            expected = b.engine.sample(_request(seed=seed, prompt=(5, 3), sampling=group(3).sampling))
            assert (await b.blob(header)).response_token_ids.tolist() == expected.token_ids.tolist()


async def test_a_group_that_takes_too_long_is_drawn_again_and_then_given_up() -> None:
    async with bench(limits=replace(LIMITS, group_timeout_s=0.05, lease_s=0.05)) as b:
        await b.push(V0)
        b.engine.stuck.add((5, 3))
        await b.ask(group(3), group(4))
        assert {h.trajectory_id.prompt_id for h in await b.headers(4)} == {4}
        [refusal] = await b.refusals(1)
        assert (refusal.prompt_id, refusal.reason, refusal.deliveries) == (3, "deadline", 3)
        assert refusal.message.startswith("prompt 3 was not drawn within 0.05 s; raise rollout.")
        assert b.engine.named("abort").count((5, 3)) == 3


async def test_an_engine_that_answers_nothing_any_more_ends_the_service() -> None:
    with pytest.raises(PeerLostError, match=r"the engine hangs: prompt 3 was not drawn within 0.05 s"):
        async with bench(limits=replace(LIMITS, group_timeout_s=0.05)) as b:
            await b.push(V0)
            b.engine.hold()
            await b.ask(group(3))
            await asyncio.sleep(5)


async def test_a_group_whose_takers_died_is_given_up_without_another_attempt() -> None:
    async with bench(limits=replace(LIMITS, lease_s=0.05)) as b:
        stream = names.prompts(RUN, 0)
        await b.ask(group(3), group(4))
        await b.broker.ensure_group(stream, names.ROLLOUT_GROUP)
        await b.broker.read(stream, names.ROLLOUT_GROUP, "dead/1", max_entries=1, block_s=0)
        for taker in ("dead/2", "dead/3"):
            await b.broker.reclaim(stream, names.ROLLOUT_GROUP, taker, min_idle_s=0, max_entries=9)
        await b.push(V0)
        assert {h.trajectory_id.prompt_id for h in await b.headers(4)} == {4}
        [refusal] = await b.refusals(1)
        assert (refusal.prompt_id, refusal.reason, refusal.deliveries) == (3, "max_deliveries", 4)
        assert "was taken 3 times, and no server has answered" in refusal.message
        assert (5, 3) not in b.engine.named("generate")


async def test_an_engine_that_fails_every_group_ends_the_service() -> None:
    with pytest.raises(PeerLostError, match="8 prompt groups failed one after the other; .*RuntimeError: x"):
        async with bench() as b:
            await b.push(V0)
            b.engine.errors.update({(5, p): RuntimeError("x") for p in range(8)})
            await b.ask(*(group(p) for p in range(8)))
            await asyncio.sleep(5)


@pytest.mark.parametrize(
    ("keys", "seconds"),
    [
        ({"data__max_response_length": 1024}, (600.0, 900.0, 1800.0)),
        ({"data__max_response_length": 32_000}, (6400.0, 9600.0, 19_200.0)),
        ({"data__max_response_length": 32_000, "rollout__request_timeout_s": 10.0}, (10.0, 15.0, 30.0)),
        ({"barrier__stall_timeout_s": 7.0, "barrier__collect_timeout_s": 8.0}, (600.0, 7.0, 8.0)),
    ],
)
def test_deadlines_follow_the_response_length(keys: dict[str, float], seconds: tuple[float, ...]) -> None:
    changed = config(**{"barrier__stall_timeout_s": None, **keys}, actor__ppo_max_token_len_per_gpu=40_000)
    limits = SamplerLimits.of(changed)
    assert (limits.group_timeout_s, limits.append_timeout_s, changed.collect_timeout_s) == seconds
    assert limits.max_deliveries == 6


async def test_two_draws_of_one_sample_never_share_a_blob() -> None:
    async with bench() as b:
        await b.push(V0)
        await b.ask(group(1), group(1))
        headers = await b.headers(8)
        assert len({h.blob_key for h in headers}) == 8
        assert headers[0].blob_key.startswith(names.blob(RUN, "train:1:1:0", "rollout-0", "x."))
        for header in headers:
            [data] = await b.broker.get_blobs([header.blob_key])
            assert data is not None
            assert blob_digest(data) == header.blob_digest


class DiesBeforeTheAcknowledgement(MemoryBroker):
    """The process is gone after its results are stored, if an acknowledgement is a second command."""

    async def ack(self, stream: str, group: str, entry_ids: Sequence[str]) -> None:
        if stream == names.prompts(RUN, 0):
            await asyncio.sleep(3600)
        await super().ack(stream, group, entry_ids)


async def test_results_and_acknowledgement_are_stored_together() -> None:
    async with bench(broker=DiesBeforeTheAcknowledgement()) as b:
        await b.push(V0)
        await b.ask(group(1))
        await b.headers(4)
        assert await b.left_over(0) == 0


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
        await b.quiet(5)
        await asyncio.sleep(0.2)
        # At most an engine's worth handed on, one that waits for room, and one that was begun when nothing
        # waited yet.
        assert len(b.engine.named("generate")) <= 12
        assert 16 <= b.server.in_flight <= 32
        await b.headers(120)
        await asyncio.sleep(0.01)
        assert b.server.in_flight == 0


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


async def test_a_group_delivered_twice_is_drawn_twice_with_the_same_tokens() -> None:
    async with bench() as b:
        await b.push(V0)
        await b.ask(group(1), group(1))
        headers = await b.headers(8)
        drawn = [(await b.blob(h)).response_token_ids.tolist() for h in headers]
        ids = [h.trajectory_id.sample_index for h in headers]
        assert ids == [0, 1, 2, 3, 0, 1, 2, 3]
        assert drawn[:4] == drawn[4:]


async def test_a_push_of_another_group_or_before_joining_is_refused() -> None:
    async with bench(joined=False) as b:
        with pytest.raises(VersionMismatchError, match="weight group None, the push is for group 1"):
            await b.server.receive(1, 0)
        assert b.server.standing.state is RolloutState.STALE
        await b.server.join(2, weight_group_spec(), 1)
        with pytest.raises(VersionMismatchError, match="weight group 2, the push is for group 1"):
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


async def test_a_drained_server_finishes_its_groups_and_begins_no_more() -> None:
    async with bench() as b:
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
        await asyncio.wait_for(draining, 3)
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
    async with bench() as b:
        await b.push(V0)
        b.engine.hold()
        await b.ask(*(group(p) for p in range(6)))
        await b.quiet(4)
        draining = asyncio.create_task(b.server.drain())
        await asyncio.sleep(0.01)
        b.engine.release()
        await asyncio.wait_for(draining, 3)
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
        await asyncio.wait_for(draining, 3)
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
    async with bench(broker=broker, limits=replace(LIMITS, lease_s=0.1)) as b:
        await b.push(V0)
        b.engine.hold()
        await b.ask(group(1), group(2))
        await b.quiet(2)
        broker.here.clear()
        b.engine.release()
        await asyncio.sleep(0.2)
        async with asyncio.timeout(1):
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
        with pytest.raises(VersionMismatchError, match="weight group None, the push is for group 1"):
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
            await asyncio.sleep(5)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
async def test_log_probabilities_that_are_no_numbers_never_leave(value: float) -> None:
    async with bench() as b:
        await b.push(V0)
        b.engine.log_prob = value
        await b.ask(group(3))
        [refusal] = await b.refusals(1)
        assert (refusal.prompt_id, refusal.reason, refusal.deliveries) == (3, "not_finite", 1)
        assert "v0@0000000000000000 are unusable" in refusal.message
        assert await b.broker.length(names.trajectories(RUN)) == 0


async def test_samples_that_no_reader_accepts_are_their_groups_failure() -> None:
    async with bench() as b:
        await b.push(V0)
        b.engine.log_prob = 0.5
        await b.ask(group(3))
        [refusal] = await b.refusals(1)
        assert (refusal.prompt_id, refusal.reason) == (3, "out_of_range")
        assert "response_log_probs holds 0.5, a log-probability is at most 0" in refusal.message
        b.engine.log_prob = -1.0
        await b.ask(group(4))
        await b.headers(4)


async def test_a_probe_that_fails_is_an_answer() -> None:
    async with bench(limits=replace(LIMITS, group_timeout_s=0.05, lease_s=0.05)) as b:
        await b.push(V0)
        b.engine.stuck.add((5, 3))
        b.engine.errors[(5,)] = RuntimeError("no single token")
        await b.ask(group(3))
        [refusal] = await b.refusals(1)
        assert (refusal.prompt_id, refusal.reason) == (3, "deadline")


async def test_weights_that_give_no_numbers_end_the_service() -> None:
    with pytest.raises(NumericsError, match=r"8 prompt groups failed one after the other; .* are unusable"):
        async with bench() as b:
            await b.push(V0)
            b.engine.log_prob = float("nan")
            await b.ask(*(group(p) for p in range(8)))
            await asyncio.sleep(5)
