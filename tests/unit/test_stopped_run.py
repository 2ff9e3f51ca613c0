"""A run that is told to end after its step: the step is saved, and the run goes on as if nobody had asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.controller.journal import Journal
from paceline.core.clock import SystemClock
from paceline.core.guard import Reading
from support.fake_fleet import FakeServices
from support.memory_broker import MemoryBroker
from support.sequencer_run import SequencerRun, config, run_of
from support.training_run import is_time

CHANGES: dict[str, Any] = {
    "trainer__test_freq": 0,
    "trainer__save_freq": 4,
    "trainer__total_steps": 7,
    "trainer__save_trajectories": False,
}


async def run_to(folder: Path, services: FakeServices, *, stop_in: int, **changes: Any) -> SequencerRun:
    """Runs with a new broker; asks it to stop while a step is trained, in none if that is 0."""
    async with run_of(config(**CHANGES, **changes), folder, services, MemoryBroker()) as it:
        services.writes = True
        services.standings.clear()
        services.trained.clear()
        honest = services.learner.train

        async def train(member: Any, order: Any) -> Any:
            if order.step == stop_in:
                it.sequencer.progress.stop_reason = "SIGINT"
            return await honest(member, order)

        services.learner.train = train  # type: ignore[method-assign]
        try:
            await it.enlist_all()
            await it.go()
        finally:
            services.learner.train = honest  # type: ignore[method-assign]
        return it


def numbers(it: SequencerRun) -> list[dict[str, float]]:
    return [{name: v for name, v in row.items() if not is_time(name)} for row in it.lines()]


async def test_it_ends_after_the_step_with_a_checkpoint_and_goes_on(tmp_path: Path) -> None:
    expected = await run_to(tmp_path / "undisturbed", FakeServices(), stop_in=0)
    services = FakeServices()
    it = await run_to(tmp_path / "run", services, stop_in=3)
    assert it.sequencer.result == "stopped after step 3 of 7: SIGINT"
    assert services.calls[-1] == "save 3"
    assert [e["step"] for e in it.events() if e["event"] == "checkpoint"] == [3]
    assert numbers(it) == numbers(expected)[:4]
    it = await run_to(tmp_path / "run", services, stop_in=0)
    assert it.sequencer.result == "7 steps done"
    assert numbers(it) == numbers(expected)
    assert services.batches == expected.services.batches
    assert it.breaches() == []


@pytest.mark.parametrize("in_order", [True, False])
async def test_a_resume_says_whether_the_broker_was_emptied_or_lost_its_data(
    tmp_path: Path, in_order: bool
) -> None:
    services = FakeServices()
    await run_to(tmp_path, services, stop_in=3)
    if in_order:  # as the service's `main` does, which these runs are without
        journal = Journal(tmp_path / "events.jsonl", SystemClock())
        journal.record("end", ok=False, message="stopped after step 3 of 7: SIGINT", step=3)
        journal.close()
    it = await run_to(tmp_path, services, stop_in=0)
    (event,) = [e for e in it.events() if e["event"] == "lost"]
    begins = (
        "the last controller ended in order" if in_order else "the message broker has lost the run's data"
    )
    assert (event["step"], event["reason"].startswith(begins)) == (4, True), event
    assert it.breaches() == []


async def test_a_stop_before_the_first_step_trains_nothing(tmp_path: Path) -> None:
    services = FakeServices()
    async with run_of(config(**CHANGES), tmp_path, services, MemoryBroker()) as it:
        it.sequencer.progress.stop_reason = "SIGINT"
        await it.enlist_all()
        await it.go()
        assert it.sequencer.result == "stopped after step 0 of 7: SIGINT"
    assert services.orders == []
    assert it.breaches() == []


@pytest.mark.parametrize("stop_in", [0, 5])
async def test_a_rollback_goes_where_it_would_go_without_the_stop(tmp_path: Path, stop_in: int) -> None:
    services, rules = FakeServices(), {"rollback": 0.1, "skip": None}
    services.readings = {6: [Reading(rule="ppo_kl", network="actor", value=0.3)]}
    if stop_in:
        await run_to(tmp_path, services, stop_in=stop_in, guard__ppo_kl=rules)
    it = await run_to(tmp_path, services, stop_in=0, guard__ppo_kl=rules)
    assert [(e["step"], e["to_step"]) for e in it.events() if e["event"] == "rollback"] == [(6, 4)]
