"""What the controller exports of a run: members, recoveries, phases, mailboxes, pushes, the guard."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from paceline.broker import names
from paceline.broker.base import Outgoing
from paceline.controller.fleet.membership import Fleet, FleetChange
from paceline.controller.fleet.meter import FleetMeter
from paceline.controller.health import measure_mailboxes, observe_run
from paceline.core.clock import SystemClock
from paceline.core.guard import Reading
from paceline.core.members import MemberKind, RolloutState
from paceline.service.observability import metrics
from support.clocks import ManualClock
from support.measured import measured
from support.sequencer_run import RUN, run


def test_a_member_that_dies_and_comes_back_is_counted_and_timed() -> None:
    clock = ManualClock()
    fleet, meter = Fleet(clock, suspect_after_s=5, dead_after_s=12), FleetMeter(clock)

    def apply(changes: list[FleetChange]) -> None:
        for change in changes:
            meter.note(change)

    def register(incarnation: str, state: RolloutState) -> None:
        apply(
            fleet.register(
                kind=MemberKind.ROLLOUT,
                member_id="rollout-0",
                incarnation=incarnation,
                address="h:1",
                num_ranks=1,
                state=state,
            )
        )

    with measured() as read:
        register("a", RolloutState.STALE)
        assert read(metrics.MEMBER_RESTARTS) == {"rollout rollout-0": 0}
        assert read(metrics.MEMBER_CHANGES)["suspect rollout"] == 0
        for _ in range(30):
            clock.advance(0.5)
            apply(fleet.sweep())
        assert read(metrics.RECOVERY_SECONDS) == {}
        # Dead after 12.5 s of silence, heard again after 15 s: no restart.
        register("a", RolloutState.STALE)
        assert read(metrics.RECOVERY_SECONDS) == {"rollout rollout-0": 2.5}
        assert read(metrics.MEMBER_RESTARTS) == {"rollout rollout-0": 0}
        register("b", RolloutState.JOINING)
        clock.advance(7.0)
        apply(fleet.heartbeat("rollout-0", "b", state=RolloutState.STALE, policy=None, in_flight=0)[1])
        assert read(metrics.MEMBER_RESTARTS) == {"rollout rollout-0": 1}
        changes = read(metrics.MEMBER_CHANGES)
        assert {change: changes[f"{change} rollout"] for change in ("registered", "suspect", "dead")} == {
            "registered": 3,
            "suspect": 1,
            "dead": 2,
        }
        assert read(metrics.RECOVERY_SECONDS) == {"rollout rollout-0": 7.0}


async def test_a_run_exports_its_health(tmp_path: Path) -> None:
    with measured() as read:
        async with run(tmp_path, guard__reference_kl={"warn": 0.5}) as it:
            await it.enlist_all()
            progress = it.sequencer.progress
            observe_run(it.sequencer._run, progress, it.supervisor.fleet, SystemClock())
            assert read(metrics.PHASE_SECONDS).keys() == {"starting"}
            assert read(metrics.POLICY_VERSION) == {}
            assert read(metrics.PUSHES) == {"committed": 0, "lost": 0}
            await it.go()
            assert read(metrics.PHASE_SECONDS).keys() == {"ended"}
            assert read(metrics.RUN_STEP) == read(metrics.RUN_STEPS) == {"": 2}
            assert read(metrics.TRAINING_STEP) == {"": 2}
            assert read(metrics.POLICY_VERSION) == {"": 2}
            assert read(metrics.PUSHES) == {"committed": 3, "lost": 0}
            assert 0 < read(metrics.PUSH_SECONDS)[""] < 5
            # Two steps of 3 prompts with 2 samples; two validations of 2 prompts with a sample each.
            assert read(metrics.VERDICTS)["admitted"] == 16
            assert read(metrics.MEMBERS) == {
                "alive learner ready": 1,
                "alive reward serving": 1,
                "alive rollout serving": 2,
            }
            assert read(metrics.MEMBER_IN_FLIGHT)["rollout rollout-0"] == 0
            assert read(metrics.MEMBER_SILENCE).keys() == {
                "learner learner",
                "reward reward-0",
                "rollout rollout-0",
                "rollout rollout-1",
            }
            assert read(metrics.training("actor/ppo_kl")) == {"": it.lines()[-1]["actor/ppo_kl"]}
            assert read(metrics.training("timing_s/step")) == {"": it.lines()[-1]["timing_s/step"]}
            assert read(metrics.GUARD_BOUND)["warn reference_kl"] == 0.5


async def test_what_the_guard_judged_is_exported_in_the_units_of_its_bounds(tmp_path: Path) -> None:
    with measured() as read:
        async with run(tmp_path) as it:
            await it.enlist_all()
            observe_run(it.sequencer._run, it.sequencer.progress, it.supervisor.fleet, SystemClock())
            it.services.readings[1] = [Reading(rule="non_finite", network="actor", value=1.0)]
            it.services.readings[2] = [
                Reading(rule="ppo_kl", network="actor", value=0.04),
                Reading(rule="grad_norm", network="actor", value=30.0, reference=2.0),
            ]
            assert read(metrics.GUARD_VALUE) == {}
            assert set(read(metrics.GUARD_FIRINGS).values()) == {0}
            await it.go()
            of_the_controller = {" groups_without_spread": 0.0, " reward_errors": 0.0, " out_of_memory": 0.0}
            of_the_controller[" val_fall"] = 0.0
            of_the_learner = {"actor ppo_kl": 0.04, "actor grad_norm": 15.0}
            assert read(metrics.GUARD_VALUE) == of_the_controller | of_the_learner
            fired = {labels: number for labels, number in read(metrics.GUARD_FIRINGS).items() if number}
            assert fired == {"warn actor non_finite": 1, "warn actor ppo_kl": 1, "warn actor grad_norm": 1}


async def test_mailboxes_are_measured(tmp_path: Path) -> None:
    with measured() as read:
        async with run(tmp_path) as it:
            await it.enlist_all()
            for stream, number in ((names.trajectories(RUN), 3), (names.prompts(RUN, 0), 2)):
                await it.broker.append([Outgoing(stream=stream, payload=b"x")] * number)
            measuring = asyncio.create_task(measure_mailboxes(it.broker, RUN, it.sequencer.progress))
            async with asyncio.timeout(120):
                while len(read(metrics.MAILBOX_ENTRIES)) < 3:  # noqa: ASYNC110  a test's own look
                    await asyncio.sleep(0.01)
            measuring.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await measuring
            assert read(metrics.MAILBOX_ENTRIES) == {"prompts": 2, "trajectories": 3, "scored": 0}
