"""A step that is collected by members which are killed.

Real sampler, reward consumer, collector, mailboxes and journal over a broker in memory; the engine computes
nothing.

A member is killed at a call to its broker, before the call takes effect, or after that but before the member
gets the answer; from then on it makes no calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.controller.batch.collect import Collector
from paceline.controller.batch.collected_batch import Batch
from paceline.controller.batch.dispatch import Ask, Dispatcher, Order
from paceline.controller.batch.mailboxes import Mailboxes
from paceline.controller.batch.refill import Refill
from paceline.controller.events import EventHub
from paceline.controller.journal import Journal
from paceline.controller.progress import Run
from paceline.core.clock import SystemClock
from paceline.core.errors import BrokerError
from paceline.core.ids import Purpose
from paceline.core.policy import PolicyTag
from paceline.core.samples.trajectory import RewardContext, SamplingSpec
from paceline.core.scoring import ScoreItem
from paceline.data.mixture import PromptMixture
from paceline.data.prompts import Prompt
from paceline.reward.consumer import Consumer, ConsumerOptions
from paceline.reward.scoring.scorer import Scorer
from paceline.reward.scoring.scores import Score
from paceline.rollout.capacity import SamplerLimits
from paceline.rollout.engines.base import Engine, do_nothing
from paceline.rollout.episodes.group import Episodes
from paceline.rollout.sampler import Sampler
from paceline.wire import decode_trajectory
from support.clocks import ManualClock
from support.fake_engine import FakeEngine
from support.memory_broker import MemoryBroker, MemoryStore

RUN, STEP, NUM_SAMPLES, LEASE_S = "run-1", 3, 2, 0.06
POLICY = PolicyTag(version=2, digest="2" * 16)
PROMPTS = {
    i: Prompt(
        prompt_id=i,
        token_ids=np.arange(1, 3 + i % 4, dtype=np.int32),
        context=RewardContext(ground_truth=str(i)),
    )
    for i in range(10, 22)
}
LIMITS = SamplerLimits(
    num_samples=8,
    num_groups=3,
    group_timeout_s=60.0,
    lease_s=LEASE_S,
    max_stream_length=1000,
    append_timeout_s=5.0,
    max_deliveries=1000,
)


class MortalBroker:
    """A client whose process dies at its `lifetime`-th call; `hears` says whether that call takes effect."""

    def __init__(self, broker: MemoryBroker, lifetime: int | None, *, hears: bool) -> None:
        self._broker, self._left, self._hears = broker, lifetime, hears
        self.dead, self.lease_s = asyncio.Event(), LEASE_S
        self.poison: tuple[int, ...] = ()

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        method = getattr(self._broker, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if not self.dead.is_set() and self._left is not None:
                self._left -= 1
                if self._left < 0:
                    self.dead.set()
                    if self._hears:
                        await method(*args, **kwargs)
            if self.dead.is_set():
                raise BrokerError("this member was killed")
            return await method(*args, **kwargs)

        return call


class Letters:
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(32 + token) for token in token_ids)


class Parities:
    """Odd lengths are worth 1, so that some groups have equal scores."""

    async def score(self, items: Sequence[ScoreItem], *, run_id: str, step: int) -> list[Score]:
        await asyncio.sleep(0.001)
        return [
            Score(trajectory_id=item.trajectory_id, reward=float(len(item.response) % 2), components={})
            for item in items
        ]


class SlowEngine(FakeEngine):
    """The process dies as soon as it draws the prompt `broker.poison`."""

    def __init__(self, broker: MortalBroker) -> None:
        super().__init__()
        self._broker = broker

    async def generate(self, requests: Sequence[Any], ended: Callable[[], None] = do_nothing) -> Any:
        await asyncio.sleep(0.001 * (1 + requests[0].seed % 4))
        if tuple(requests[0].prompt_token_ids) == self._broker.poison:
            self._broker.dead.set()
            await asyncio.Event().wait()
        return await super().generate(requests, ended)


Work = Callable[[MortalBroker, str], Coroutine[Any, Any, None]]


async def roll_out(
    broker: MortalBroker,
    name: str,
    engine: Engine | None = None,
    episodes: Episodes | None = None,
    *,
    save_progress_s: float = LIMITS.save_progress_s,
) -> None:
    """A rollout process from its commit to its death."""
    sessions: list[asyncio.Task[None]] = []

    def spawn(name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        sessions.append(asyncio.create_task(work, name=name))
        return sessions[-1]

    sampler = Sampler(
        engine=engine or SlowEngine(broker),
        broker=broker,
        run_id=RUN,
        server_id=name.partition("/")[0],
        incarnation=name.partition("/")[2],
        limits=replace(
            LIMITS,
            lease_s=broker.lease_s,
            max_deliveries=6 if broker.poison else LIMITS.max_deliveries,
            save_progress_s=save_progress_s,
        ),
        spawn=spawn,
        episodes=episodes,
    )
    sampler.open(POLICY)
    await sessions[0]


async def reward(broker: MortalBroker, name: str, scorer: Scorer | None = None) -> None:
    """A reward process from its start to its death."""
    options = ConsumerOptions(run_id=RUN, member_id=name, lease_s=broker.lease_s, max_entries=4)
    await Consumer(broker=broker, scorer=scorer or Parities(), tokenizer=Letters(), options=options).run()


@dataclass
class Fleet:
    """Slots whose process is started again whenever it is killed."""

    clock: ManualClock
    store: MemoryStore
    rng: np.random.Generator
    num_deaths: int
    poison: tuple[int, ...] = ()
    deaths: list[str] = field(default_factory=list)

    async def keep(self, slot: str, work: Work) -> None:
        for incarnation in range(1000):
            mortal = incarnation < self.num_deaths
            lifetime = int(self.rng.integers(1, 14)) if mortal else None
            broker = MortalBroker(
                MemoryBroker(self.clock, store=self.store), lifetime, hears=bool(self.rng.integers(2))
            )
            # Where nobody dies, a slow machine must not look like a death.
            broker.lease_s = LEASE_S if self.num_deaths or self.poison else 30.0
            broker.poison = self.poison
            process = asyncio.create_task(work(broker, f"{slot}/{incarnation}"))
            died = asyncio.create_task(broker.dead.wait())
            try:
                await asyncio.wait([process, died], return_when=asyncio.FIRST_COMPLETED)
                assert broker.dead.is_set(), process
                self.deaths.append(slot)
            finally:
                died.cancel()
                process.cancel()
                await asyncio.gather(process, died, return_exceptions=True)


async def tick(clock: ManualClock) -> None:
    """Moves the time by which leases lapse. It stands still while this process does, as all members do."""
    while True:
        await asyncio.sleep(LEASE_S / 6)
        clock.advance(LEASE_S / 6)


def config() -> RunConfig:
    return parse(
        RunConfig,
        {
            "data": {"train_files": "t.jsonl", "train_batch_size": len(PROMPTS)},
            "model": {"path": "m"},
            "actor": {"ppo_mini_batch_size": len(PROMPTS)},
            "reward": {"functions": [{"name": "exact_match"}]},
            "trainer": {"total_steps": 9},
            "barrier": {"stall_timeout_s": 250.0, "collect_timeout_s": 300.0},
        },
    )


def refill_from(cursor: PromptMixture, first: Collection[int]) -> Refill:
    """As many further prompts as there are."""

    def draw(count: int, without: Collection[int]) -> dict[int, Prompt]:
        return {i: PROMPTS[i] for i in cursor.take_more(count, without=without)}

    return Refill(asked=first, max_extra=len(PROMPTS), draw=draw)


async def collect(
    folder: Path,
    *,
    seed: int,
    num_deaths: int,
    num_first: int = len(PROMPTS),
    poison: tuple[int, ...] = (),
    works: tuple[Work, Work] = (roll_out, reward),
    run_config: RunConfig | None = None,
) -> tuple[Batch, MemoryBroker, Fleet]:
    """One step over two rollout and two reward slots, each of which dies `num_deaths` times.

    With `num_first` fewer than there are, groups of equal scores are replaced by the others, and each prompt
    has a greedy answer too. `works` are what a rollout and a reward process do.
    """
    clock, store, refilled = ManualClock(), MemoryStore(), num_first < len(PROMPTS)
    cursor = PromptMixture({"": list(PROMPTS)}, batch_size=num_first, seed=seed, shuffle=refilled)
    broker = MemoryBroker(clock, store=store)
    fleet = Fleet(clock, store, np.random.default_rng(seed), num_deaths, poison)
    mailboxes = Mailboxes(broker, RUN, own_server=False)
    journal = Journal(folder / "events.jsonl", SystemClock())
    run = Run(config=run_config or config(), id=RUN, dir=folder, journal=journal, events=EventHub())
    collector = Collector(
        run,
        broker=broker,
        mailboxes=mailboxes,
        dispatcher=Dispatcher(run, broker),
        wait_for_services=lambda: asyncio.sleep(0),
        count=lambda *_: None,
    )
    await collector.begin_anew()
    sampling = SamplingSpec(temperature=1.0, max_tokens=12, stop_token_ids=(0,))
    asks = (
        Ask(purpose=Purpose.TRAIN, num_samples=NUM_SAMPLES, sampling=sampling),
        Ask(purpose=Purpose.GREEDY, num_samples=1, sampling=replace(sampling, temperature=0.0)),
    )
    order = Order(
        step=STEP,
        policy=POLICY,
        prompts={i: PROMPTS[i] for i in cursor.take(1)},
        asks=asks if refilled else asks[:1],
    )
    refill = refill_from(cursor, order.prompts) if refilled else None
    slots = [
        (f"{kind}-{i}", work) for kind, work in zip(("rollout", "reward"), works, strict=True) for i in (0, 1)
    ]
    working = [asyncio.create_task(fleet.keep(slot, work)) for slot, work in slots]
    working.append(asyncio.create_task(tick(clock)))
    try:
        await collector.dispatch(order)
        batch = await collector.collect(order, refill)
    finally:
        for task in working:
            task.cancel()
        ends = await asyncio.gather(*working, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
    return batch, broker, fleet


async def content(batch: Batch, broker: MemoryBroker) -> list[tuple[Any, ...]]:
    """What the learner would train on, row by row."""
    rows: list[tuple[Any, ...]] = []
    blobs = await broker.get_blobs([header.blob_key for header in batch.samples])
    for header, blob in zip(batch.samples, blobs, strict=True):
        assert blob is not None, f"the blob of {header.trajectory_id} is gone"
        trajectory = decode_trajectory(blob)
        assert trajectory.trajectory_id == header.trajectory_id
        tokens = trajectory.response_token_ids.tolist()
        rows.append((str(header.trajectory_id), header.policy, header.reward, tokens))
    return rows
