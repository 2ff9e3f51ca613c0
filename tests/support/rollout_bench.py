"""A rollout server over the memory broker, with an engine that records what is asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.broker import names
from paceline.broker.base import Outgoing
from paceline.core.ids import Purpose, sample_seed
from paceline.core.policy import PolicyTag
from paceline.core.samples.trajectory import (
    GroupRefusal,
    PromptGroup,
    RewardContext,
    SamplingSpec,
    Trajectory,
)
from paceline.rollout.capacity import SamplerLimits
from paceline.rollout.engines.base import Engine
from paceline.rollout.episodes.group import Episodes
from paceline.rollout.sampler import Sampler
from paceline.rollout.server import Parts, RolloutServer
from paceline.weights.geometry.layout import RankLayout
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.wire import (
    decode_scored,
    decode_trajectory,
    decode_trajectory_header,
    encode_prompt_group,
)
from support.fake_engine import FakeEngine
from support.memory_broker import MemoryBroker

RUN = "run-1"
V0 = PolicyTag(version=0, digest="0" * 16)
V1 = PolicyTag(version=1, digest="1" * 16)
LIMITS = SamplerLimits(
    num_samples=16,
    num_groups=100,
    group_timeout_s=120.0,
    lease_s=20.0,
    max_stream_length=1000,
    append_timeout_s=120.0,
    max_deliveries=3,
    probe_timeout_s=60.0,
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
        """The next trajectory headers, in order of arrival; fails where they do not come within 120 s."""
        stream = names.trajectories(RUN)
        await self.broker.ensure_group(stream, "test")
        headers: list[Any] = []
        async with asyncio.timeout(120):
            while len(headers) < wanted:
                entries = await self.broker.read(stream, "test", "me", max_entries=100, block_s=0.5)
                await self.broker.ack(stream, "test", [entry.entry_id for entry in entries])
                headers += [decode_trajectory_header(entry.payload) for entry in entries]
        return headers

    async def refusals(self, wanted: int) -> list[GroupRefusal]:
        """The group refusals so far, at least `wanted`; fails where they do not come within 120 s."""
        stream = names.scored(RUN)
        async with asyncio.timeout(120):
            while await self.broker.length(stream) < wanted:  # noqa: ASYNC110 - as `quiet`
                await asyncio.sleep(0.01)
        entries = await self.broker.read_log(stream, after="0-0", max_entries=100, block_s=0)
        refusals = [decode_scored(entry.payload) for entry in entries]
        return [refusal for refusal in refusals if isinstance(refusal, GroupRefusal)]

    async def blob(self, header: Any) -> Trajectory:
        [data] = await self.broker.get_blobs([header.blob_key])
        assert data is not None
        return decode_trajectory(data)

    async def left_over(self, version: int | None) -> int:
        """Prompt groups of a version that nobody has acknowledged; takes them away."""
        stream = names.prompts(RUN, version)
        await self.broker.ensure_group(stream, names.ROLLOUT_GROUP)
        where = (stream, names.ROLLOUT_GROUP, "inspector")
        pending = await self.broker.reclaim(*where, min_idle_s=0, max_entries=100)
        return len(pending) + len(await self.broker.read(*where, max_entries=100, block_s=0))

    async def quiet(self, count: int) -> None:
        """Returns when the engine has begun with `count` groups."""
        async with asyncio.timeout(120):
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
    episodes: Callable[[Engine], Episodes] | None = None,
    name: str = "rollout-0",
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
                server_id=name,
                incarnation="x",
                limits=limits,
                spawn=spawn,
                episodes=None if episodes is None else episodes(engine),
            )
            server.start(Parts(engine=engine, sampler=sampler, join_timeout_s=120, push_timeout_s=120))
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
