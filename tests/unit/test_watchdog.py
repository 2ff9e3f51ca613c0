"""The watchdog names phase, members and seconds when nothing moves on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.controller.events import EventHub
from paceline.controller.fleet.membership import Fleet
from paceline.controller.journal import Journal
from paceline.controller.phases import Phase
from paceline.controller.progress import Progress, Run
from paceline.controller.watchdog import Watchdog
from paceline.core.members import LearnerState, MemberKind, RewardState, RolloutState
from support.clocks import ManualClock
from support.sequencer_run import config


class Bench:
    """A watchdog over a fleet of two servers and a learner."""

    def __init__(self, folder: Path) -> None:
        self.clock, events = ManualClock(), EventHub()
        self.journal = Journal(folder / "events.jsonl", self.clock)
        run = Run(config=config(), id="r", dir=folder, journal=self.journal, events=events)
        self.progress, self.fleet = Progress(run), Fleet(self.clock, suspect_after_s=5, dead_after_s=12)
        self.progress.step, self.progress.phase = 3, Phase.COLLECT
        self.watchdog = Watchdog(self.progress, self.fleet, events, self.clock)
        for name in ("rollout-0", "rollout-1", "learner-0"):
            kind = MemberKind.LEARNER if name == "learner-0" else MemberKind.ROLLOUT
            self.fleet.register(kind=kind, member_id=name, incarnation="a", address="h:1", num_ranks=1)

    def wait(self, seconds: int) -> list[tuple[float, str]]:
        """Looks once a second; returns the notices with their times."""
        notices = []
        for _ in range(seconds):
            self.clock.advance(1)
            sentence = self.watchdog.look()
            if sentence is not None:
                notices.append((self.clock.now, sentence))
        return notices


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.journal.close()


def test_who_is_waited_for_is_named_after_half_a_minute_and_then_every_minute(bench: Bench) -> None:
    bench.progress.wanted, bench.progress.admitted = 48, 12
    bench.wait(1)
    rollout = bench.fleet.members(MemberKind.ROLLOUT)
    bench.fleet.heartbeat("rollout-0", "a", state=RolloutState.SERVING, policy=None, in_flight=7)
    bench.fleet.mark_dead(rollout[1], "CUDA error")
    begin, dead = "step 3: collect at 12 of 48 trajectories for", "rollout-1 (dead: CUDA error)"
    alive = "rollout-0 (serving, 7 under way"
    assert bench.wait(29) == []
    assert bench.wait(100) == [
        (
            31,
            f"{begin} 30 s without progress; waits for {alive}, heard 30 s ago), {dead}",
        ),
        (
            91,
            f"{begin} 90 s without progress; waits for {alive}, heard 90 s ago), {dead}",
        ),
    ]


def test_every_trajectory_is_progress(bench: Bench) -> None:
    for admitted in range(5):
        bench.progress.admitted = admitted
        assert bench.wait(20) == []


def test_a_phase_that_took_long_before_is_given_twice_that(bench: Bench) -> None:
    bench.progress.phase = Phase.LEARN
    bench.wait(1)
    times = [time for time, _ in bench.wait(100)]
    assert times == [31, 91]
    bench.progress.phase = Phase.PUBLISH
    assert bench.wait(20) == []
    bench.progress.phase = Phase.LEARN
    began = bench.clock.now + 1
    times = [time - began for time, _ in bench.wait(280)]
    assert times == [202, 262]
    assert "learn" in bench.wait(60)[0][1]


def test_the_end_is_not_waited_for(bench: Bench) -> None:
    for phase in (Phase.ENDED, Phase.FAILED):
        bench.progress.phase = phase
        assert bench.wait(200) == []


def test_while_members_start_those_that_are_not_ready_are_named(bench: Bench) -> None:
    bench.progress.phase = Phase.FORMING
    bench.wait(1)
    bench.fleet.heartbeat("rollout-0", "a", state=RolloutState.STALE, policy=None, in_flight=0)
    bench.fleet.heartbeat("rollout-1", "a", state=RolloutState.JOINING, policy=None, in_flight=0)
    bench.fleet.heartbeat("learner-0", "a", state=LearnerState.READY, policy=None, in_flight=0)
    bench.fleet.register(
        kind=MemberKind.REWARD, member_id="reward-0", incarnation="a", address="h:1", num_ranks=1
    )
    bench.fleet.heartbeat("reward-0", "a", state=RewardState.SERVING, policy=None, in_flight=0)
    ((_, sentence),) = bench.wait(30)
    assert sentence.endswith("waits for rollout-1 (joining, heard 30 s ago)")


def test_a_kind_of_which_no_member_has_registered_is_named_before_those_that_are_ready(bench: Bench) -> None:
    bench.progress.phase = Phase.FORMING
    bench.wait(1)
    bench.fleet.heartbeat("rollout-0", "a", state=RolloutState.STALE, policy=None, in_flight=0)
    bench.fleet.heartbeat("rollout-1", "a", state=RolloutState.STALE, policy=None, in_flight=0)
    bench.fleet.heartbeat("learner-0", "a", state=LearnerState.READY, policy=None, in_flight=0)
    ((_, sentence),) = bench.wait(30)
    assert sentence.endswith("waits for reward (none registered)")
