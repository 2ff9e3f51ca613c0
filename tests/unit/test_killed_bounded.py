"""With a bound on staleness, too, a controller that is killed and started again makes the undisturbed run."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from support import killed_sequencer
from support.fake_fleet import FakeServices
from support.faulty_fleet import FaultyFleet
from support.killed_sequencer import TRANSPORT, breaches_of, journal_events, kills, metrics_lines
from support.memory_broker import MemoryBroker
from support.sequencer_run import SequencerRun, config
from support.training_run import assert_same_metrics

CHANGES: dict[str, Any] = {
    "trainer__total_steps": 5,
    "trainer__save_freq": 4,
    "trainer__test_freq": 2,
    "barrier__mode": "bounded",
    "barrier__max_staleness": 2,
    "algorithm__rollout_correction": {"method": "tis"},
}


def answer(group: Any, index: int) -> dict[str, Any]:
    reward = float(index)
    return {"reward": reward, "reward_error": None, "components": {"exact_match": reward}}


async def live(
    folder: Path, fakes: FakeServices, broker: MemoryBroker, kill: tuple[int, bool] | None
) -> bool:
    """One life of a controller; returns whether it reached the end."""
    return await killed_sequencer.live(config(**CHANGES), folder, fakes, broker, answer, kill)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller's end is an exception here, which loses nothing that was written."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, fakes = tmp_path_factory.mktemp("undisturbed"), FakeServices()
    fakes.writes = True
    asyncio.run(live(folder, fakes, MemoryBroker(), None))
    ages = [order.step - 1 - order.policy.version for order in fakes.orders]
    assert ages == [0, 1, 2, 2, 0]
    return folder


def in_steps(recorded: list[dict[str, Any]], steps: range) -> range:
    """The events from the beginning of the first of these steps to the end of the last."""
    ends = {e["step"]: e["n"] for e in recorded if e["event"] == "step"}
    return range(ends[steps[0] - 1] + 1, ends[steps[-1]] + 1)


@pytest.mark.parametrize("written", [True, False])
async def test_a_controller_killed_at_any_event_goes_on(
    undisturbed: Path, tmp_path: Path, written: bool
) -> None:
    """At those of step 2, whose samples were drawn in step 1, as others are drawn for step 4."""
    expected, recorded = metrics_lines(undisturbed), journal_events(undisturbed)
    digests = [e["digest"] for e in recorded if e["event"] == "trained"]
    for number in kills(recorded, written=written):
        if number not in in_steps(recorded, range(2, 3)):
            continue
        folder, fakes, broker = tmp_path / f"{number}", FakeServices(), MemoryBroker()
        folder.mkdir()
        fakes.writes = True
        what = f"killed at {number}: {recorded[number]}"
        assert not await live(folder, fakes, broker, (number, written)), what
        assert await live(folder, fakes, broker, None), what
        assert_same_metrics(metrics_lines(folder), expected, without=TRANSPORT)
        assert [digest for _, digest in fakes.trained] == digests, what
        assert breaches_of(folder, config(**CHANGES)) == [], what


async def test_a_learner_that_goes_back_to_a_checkpoint_repeats_the_undisturbed_run(tmp_path: Path) -> None:
    """Nothing was sampled ahead of the checkpoint, so nothing that is gone is missed."""
    changes = {
        **CHANGES,
        "trainer__total_steps": 6,
        "trainer__save_freq": 3,
        "trainer__save_trajectories": False,
    }
    lines = {}
    for lost_in in (0, 5):
        lines[lost_in] = await lines_of(FaultyFleet(tmp_path / f"{lost_in}", changes), lost_in)
    assert_same_metrics(lines[5], lines[0], without=TRANSPORT)


async def lines_of(fleet: FaultyFleet, lost_in: int) -> list[dict[str, Any]]:
    """The metrics of a run whose learner is lost when it has trained a step; 0: in none."""

    def lose(it: SequencerRun, event: dict[str, Any]) -> None:
        if event["event"] == "trained" and event["step"] == lost_in and not fleet.restarts:
            fleet.restart_learner(it, "it was killed")

    assert await fleet.live(lose)
    assert fleet.restarts == int(lost_in > 0)
    assert breaches_of(fleet.folder, config(**fleet.changes)) == []
    return metrics_lines(fleet.folder)
