"""A blob store dies at every event of a step, with and without the controller's death: the same run.

Half of the prompts have their samples in store 0, which dies; the others in store 1. A learner that finds no
blob says so; samples whose blobs are gone are drawn again, and nothing is trained twice.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from unit.test_empty_broker import CHANGES, ROLLBACK, check, emptying, moments, quick, rolled_back

from paceline.broker import names
from paceline.controller.verify.check import verify
from paceline.core.errors import RewardErrorKind
from support.faulty_fleet import FaultyFleet, nothing
from support.sequencer_run import config

__all__ = ["quick"]


BOUNDED = {"barrier__mode": "bounded", "barrier__max_staleness": 1, "trainer__save_freq": 4}


def fleet_of(folder: Path, **changes: Any) -> FaultyFleet:
    """A fleet with two stores."""
    fleet = rolled_back(FaultyFleet(folder, CHANGES | ROLLBACK | changes))
    fleet.services.stores, fleet.broker.has_stores = ("0", "1"), True
    return fleet


def count(fleet: FaultyFleet, event: str, **fields: Any) -> int:
    """How many such events the fleet's journal has."""
    return len(events_of(fleet, event, **fields))


def events_of(fleet: FaultyFleet, event: str, **fields: Any) -> list[dict[str, Any]]:
    wanted = {"event": event, **fields}
    return [e for e in fleet.journal() if all(e.get(name) == value for name, value in wanted.items())]


@pytest.mark.parametrize("killed", ["never", "then", "in the next phase"])
async def test_a_store_dies_at_any_event(killed: str, tmp_path: Path) -> None:
    calm, events = fleet_of(tmp_path / "calm"), list[dict[str, Any]]()
    assert await calm.live(lambda it, event: events.append(event))
    num_again, num_lost = 0, 0
    for number in moments(events):
        fleet = fleet_of(tmp_path / f"{number}")
        what = f"{killed}, store lost after {number}: {events[number]}"
        lose = functools.partial(fleet.lose_store, "0")
        assert await fleet.live(emptying(lose, events, number, killed)) is (killed == "never"), what
        assert killed == "never" or await fleet.live(nothing), what
        check(fleet, calm, what)
        assert fleet.restarts == 0, what
        num_again += count(fleet, "recollect")
        num_lost += count(fleet, "trajectory", verdict="lost")
        assert bool(count(fleet, "redispatch")) is bool(count(fleet, "trajectory", verdict="lost")), what
        lost = events_of(fleet, "trajectory", verdict="lost")
        assert all(int(e["id"].split(":")[2]) % 2 == 0 for e in lost), what
    assert num_lost
    assert bool(num_again) is (killed != "then")


@pytest.mark.parametrize("killed", ["never", "then"])
async def test_a_store_dies_while_a_later_step_is_sampled(killed: str, tmp_path: Path) -> None:
    """Lost samples of weights that nobody has any more make the step begin again with newer ones."""
    calm, events = fleet_of(tmp_path / "calm", **BOUNDED), list[dict[str, Any]]()
    assert await calm.live(lambda it, event: events.append(event))
    num_lost = num_again = 0
    for number in moments(events)[::2]:
        fleet = fleet_of(tmp_path / f"{number}", **BOUNDED)
        what = f"{killed}, store lost after {number}: {events[number]}"
        lose = functools.partial(fleet.lose_store, "0")
        assert await fleet.live(emptying(lose, events, number, killed)) is (killed == "never"), what
        assert killed == "never" or await fleet.live(nothing), what
        (fleet.folder / "config.resolved.yaml").write_text(config(**fleet.changes).model_dump_json())
        findings = verify(fleet.folder)
        assert [str(breach) for breach in findings.breaches] == [], what
        assert findings.counts["steps finished"] == 3, what
        num_lost += count(fleet, "trajectory", verdict="lost")
        num_again += count(fleet, "recollect")
    assert num_again
    assert bool(num_lost) is (killed == "then")


async def test_samples_that_were_lost_before_they_were_scored_come_again(tmp_path: Path) -> None:
    calm = fleet_of(tmp_path / "calm")
    assert await calm.live(nothing)
    fleet, failed = fleet_of(tmp_path / "lost"), set[Any]()

    def unscored_once(group: Any, index: int) -> dict[str, Any]:
        key = group.trajectory_id(index)
        if group.prompt_id % 2 or index or key in failed:
            return fleet_answer(group, index)
        failed.add(key)
        return {"reward": None, "reward_error": (RewardErrorKind.LOST.value, "its blob is gone")}

    fleet_answer, fleet.answer = fleet.answer, unscored_once
    assert await fleet.live(nothing)
    check(fleet, calm, "unscored")
    assert failed
    assert count(fleet, "trajectory", verdict="lost") == len(failed)
    assert count(fleet, "group_dropped") == count(fleet, "recollect") == 0


async def test_a_store_that_dies_whenever_a_step_is_trained_is_not_the_end(tmp_path: Path) -> None:
    """The first time the other store's samples are kept; the second time all are collected again."""
    calm = fleet_of(tmp_path / "calm")
    assert await calm.live(nothing)
    fleet, deaths, kept = fleet_of(tmp_path / "dying"), list[int](), list[set[str]]()

    def disturb(it: Any, event: dict[str, Any]) -> None:
        if event["event"] == "phase" and event["to"] == "learn" and len(deaths) < 2:
            deaths.append(event["step"])
            fleet.lose_store("0")
        if event["event"] == "batch" and event["step"] == 1:
            kept.append({key for key in fleet.broker._store.blobs if names.store_of(key) == "1"})

    assert await fleet.live(disturb)
    check(fleet, calm, "dying")
    assert deaths == [1, 1]
    assert count(fleet, "recollect") == 2
    first, second, third = kept
    assert first
    assert first == second
    assert not first & third
    assert not [key for key in fleet.broker._store.blobs if ":train:1:" in key]
