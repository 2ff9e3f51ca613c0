"""Members that are told to end: who stays for the step, and how long; the run saves and goes on after it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from paceline.controller.fleet.departures import _TOGETHER_S, Departures
from paceline.controller.fleet.membership import Fleet, Member
from paceline.core.members import LearnerState, MemberKind, MemberState, RewardState, RolloutState
from support.clocks import ManualClock
from support.fake_fleet import FakeServices
from support.memory_broker import MemoryBroker
from support.sequencer_run import SequencerRun, config, run_of
from support.training_run import is_time

LEARNER, ROLLOUT, REWARD = MemberKind.LEARNER, MemberKind.ROLLOUT, MemberKind.REWARD
CHANGES: dict[str, Any] = {
    "trainer__test_freq": 0,
    "trainer__save_freq": 0,
    "trainer__total_steps": 4,
    "trainer__save_trajectories": False,
}


class Bench:
    """A fleet of a learner, two rollout servers and a reward service, all at work."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.fleet = Fleet(self.clock, suspect_after_s=5, dead_after_s=12)
        self.departures = Departures(self.fleet, self.clock)
        self.learner = self.add("learner", LEARNER, LearnerState.READY)
        self.first = self.add("rollout-0", ROLLOUT, RolloutState.SERVING)
        self.second = self.add("rollout-1", ROLLOUT, RolloutState.SERVING)
        self.reward = self.add("reward-0", REWARD, RewardState.SERVING)

    def add(self, member_id: str, kind: MemberKind, state: MemberState) -> Member:
        self.fleet.register(
            kind=kind, member_id=member_id, incarnation="a", address="h:1", num_ranks=1, state=state
        )
        (member,) = (m for m in self.fleet.members() if m.member_id == member_id)
        return member

    def holds(self, *members: Member) -> list[bool]:
        return [self.departures.holds(member) for member in members]


def test_a_server_that_others_can_replace_leaves_once_it_is_clear_that_it_is_alone() -> None:
    bench = Bench()
    assert bench.holds(bench.first) == [True]
    bench.clock.advance(4)
    assert bench.holds(bench.first) == [False]
    # Now the other one is the last.
    bench.clock.advance(4)
    assert bench.holds(bench.second) == [True]
    bench.clock.advance(400)
    assert bench.holds(bench.second) == [True]
    assert bench.departures.release() == [bench.first, bench.second]
    assert bench.holds(bench.second) == [False]


def test_servers_that_are_told_together_all_stay() -> None:
    bench = Bench()
    bench.holds(bench.first)
    bench.clock.advance(1)
    bench.holds(bench.second)
    bench.clock.advance(400)
    assert bench.holds(bench.first, bench.second) == [True, True]


def test_all_stay_whom_the_learner_needs_to_end_its_step() -> None:
    bench = Bench()
    assert bench.holds(bench.learner, bench.first) == [True, True]
    bench.clock.advance(400)
    assert bench.holds(bench.first, bench.reward, bench.learner) == [True, True, True]
    assert bench.departures.asked(LEARNER) == [bench.learner]
    released = bench.departures.release()
    assert released == [bench.learner, bench.reward, bench.first]
    assert bench.holds(*released) == [False, False, False]
    bench.fleet.leave("learner", "a", "stopped")
    assert bench.departures.asked(LEARNER) == []


def test_a_learner_that_hears_it_after_the_others_have_left_is_not_held_in_vain() -> None:
    bench = Bench()
    bench.holds(bench.reward)
    assert bench.departures.waiting == bench.departures.release() == [bench.reward]
    assert bench.holds(bench.learner) == [True]
    bench.fleet.leave("reward-0", "a", "stopped")
    assert bench.holds(bench.learner) == [False]
    bench.add("reward-1", REWARD, RewardState.SERVING)
    assert bench.holds(bench.learner) == [True]
    # One that died was not told to end: it comes back.
    other = Bench()
    other.fleet.mark_dead(other.reward, "killed")
    assert other.holds(other.learner) == [True]


def test_who_still_starts_is_needed_by_no_step_and_replaces_nobody() -> None:
    bench = Bench()
    starting = bench.add("rollout-2", ROLLOUT, RolloutState.JOINING)
    assert bench.holds(starting) == [False]
    bench.holds(bench.first, bench.second)
    bench.add("rollout-3", ROLLOUT, RolloutState.JOINING)
    bench.clock.advance(400)
    assert bench.holds(bench.first, bench.second) == [True, True]
    bench.add("rollout-4", ROLLOUT, RolloutState.SERVING)
    assert bench.holds(bench.first, bench.second) == [False, False]


def test_a_new_incarnation_was_not_told() -> None:
    bench = Bench()
    bench.holds(bench.learner)
    bench.departures.release()
    bench.fleet.register(
        kind=LEARNER,
        member_id="learner",
        incarnation="b",
        address="h:2",
        num_ranks=1,
        state=LearnerState.READY,
    )
    (learner,) = bench.fleet.usable(LEARNER)
    assert bench.departures.asked(LEARNER) == []
    assert bench.holds(learner) == [True]


def test_a_controller_that_ends_holds_nobody() -> None:
    bench = Bench()
    bench.holds(bench.learner)
    bench.departures.end()
    assert bench.holds(bench.learner, bench.reward, bench.second) == [False, False, False]


# --- the run


async def leave_when_allowed(it: SequencerRun, member_id: str) -> None:
    """What a member does whose process is told to end: it asks until it may."""
    member = it.supervisor.fleet.get(member_id)
    assert member is not None
    while it.supervisor.departures.holds(member):  # noqa: ASYNC110  a heartbeat's question
        await asyncio.sleep(0.001)
    it.services.calls.append(f"left {member_id}")
    await it.supervisor.apply(it.supervisor.fleet.leave(member_id, member.incarnation, "stopped"))


@contextlib.asynccontextmanager
async def told_in(
    folder: Path, services: FakeServices, step: int, *names: str
) -> AsyncIterator[tuple[SequencerRun, list[asyncio.Task[None]]]]:
    """A run whose members `names` are told to end while a step is trained, all that are told together."""
    async with run_of(config(**CHANGES), folder, services, MemoryBroker()) as it:
        clock = it.supervisor.departures._clock = ManualClock()
        services.writes = True
        honest, leaving = services.learner.train, list[asyncio.Task[None]]()

        async def train(member: Any, order: Any) -> Any:
            if order.step == step and not leaving:
                leaving.extend(asyncio.create_task(leave_when_allowed(it, name)) for name in names)
                await asyncio.sleep(0.01)
                assert not any(task.done() for task in leaving)
                clock.advance(_TOGETHER_S)
            return await honest(member, order)

        services.learner.train = train  # type: ignore[method-assign]
        await it.enlist_all()
        yield it, leaving
        services.learner.train = honest  # type: ignore[method-assign]


def numbers(it: SequencerRun) -> list[dict[str, float]]:
    return [{name: v for name, v in row.items() if not is_time(name)} for row in it.lines()]


async def test_a_learner_leaves_with_its_step_saved_and_the_run_goes_on_with_the_next_one(
    tmp_path: Path,
) -> None:
    async with told_in(tmp_path / "undisturbed", FakeServices(), 0) as (expected, _):
        await expected.go()
    services = FakeServices()
    async with told_in(tmp_path / "run", services, 2, "learner", "reward-0", "rollout-0", "rollout-1") as (
        it,
        leaving,
    ):
        going = asyncio.create_task(it.go())
        while len(leaving) < 4 or not all(task.done() for task in leaving):
            await asyncio.sleep(0.01)
            assert not going.done(), going.result()
        assert [call for call in services.calls if call.startswith(("train", "save"))] == [
            "train 1",
            "train 2",
            "save 2",
        ]
        assert min(services.calls.index(f"left {m}") for m in ("learner", "reward-0", "rollout-0")) > (
            services.calls.index("save 2")
        )
        assert [e["step"] for e in it.events() if e["event"] == "checkpoint"] == [2]
        # They come back as new processes.
        services.standings.clear()
        await it.enlist("learner", LEARNER, LearnerState.READY, "b")
        await it.enlist("reward-0", REWARD, RewardState.SERVING, "b")
        for i in range(2):
            await it.enlist(f"rollout-{i}", ROLLOUT, RolloutState.STALE, "b")
        await asyncio.wait_for(going, 300)
        assert numbers(it) == numbers(expected)
        assert services.batches == expected.services.batches
        assert not [e for e in it.events() if e["event"] == "rewind"]
        assert it.breaches() == []


async def test_the_run_is_saved_before_the_last_reward_service_leaves(tmp_path: Path) -> None:
    """The learner may be told a moment later, when no step can be finished any more."""
    services = FakeServices()
    async with told_in(tmp_path, services, 2, "reward-0") as (it, leaving):
        going = asyncio.create_task(it.go())
        while not leaving or not leaving[0].done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert services.calls.index("save 2") < services.calls.index("left reward-0")
        await leave_when_allowed(it, "learner")
        await it.enlist("learner", LEARNER, LearnerState.READY, "b")
        await it.enlist("reward-0", REWARD, RewardState.SERVING, "b")
        await asyncio.wait_for(going, 300)
        assert [row["step"] for row in it.lines()] == [0, 1, 2, 3, 4]
        assert it.breaches() == []


async def test_a_server_that_can_be_spared_does_not_have_the_run_saved(tmp_path: Path) -> None:
    services = FakeServices()
    async with told_in(tmp_path, services, 2, "rollout-1") as (it, leaving):
        await it.go()
        await asyncio.wait_for(leaving[0], 300)
        assert [call for call in services.calls if call.startswith("save")] == ["save 4"]


async def test_a_run_that_is_stopped_after_the_step_does_not_wait_for_another_learner(tmp_path: Path) -> None:
    services = FakeServices()
    async with told_in(tmp_path, services, 2, "learner") as (it, leaving):
        it.sequencer.progress.stop_reason = ""
        going = asyncio.create_task(it.go())
        while not leaving:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        it.sequencer.progress.stop_reason = "SIGTERM"
        await asyncio.wait_for(going, 300)
        assert it.sequencer.result == "stopped after step 2 of 4: SIGTERM"
        assert not leaving[0].done()
        it.supervisor.departures.end()
        await asyncio.wait_for(leaving[0], 300)
        assert services.calls[-2:] == ["save 2", "left learner"]
