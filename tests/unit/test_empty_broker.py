"""Redis loses all or some of its messages at every event of a step, with and without the controller's death:
the same run.

A learner that is told to start again comes back with its newest checkpoint. Numbers of entries begin anew
with the empty server, as they may where another server takes over.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.controller.batch import collect
from paceline.controller.run import backoff
from paceline.controller.verify.check import verify
from paceline.core.guard import Reading
from support.faulty_fleet import FaultyFleet, Killed, nothing
from support.sequencer_run import SequencerRun, config
from support.training_run import assert_same_metrics

CHANGES: dict[str, Any] = {
    "trainer__total_steps": 2,
    "trainer__save_freq": 1,
    "trainer__test_freq": 2,
    "trainer__save_trajectories": False,
    "barrier__stall_timeout_s": 30.0,
    "service__recovery_timeout_s": 30.0,
}
TRANSPORT = ("barrier/duplicates", "barrier/rejected", "weights/bytes", "weights/relayed_bytes")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "_CHECK_S", 0.03)
    monkeypatch.setattr(collect, "_BLOCK_S", 0.01)
    monkeypatch.setattr(backoff, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(os, "fsync", lambda file: None)


def check(fleet: FaultyFleet, calm: FaultyFleet, what: str) -> None:
    assert_same_metrics(lines(fleet), lines(calm), without=TRANSPORT)
    (fleet.folder / "config.resolved.yaml").write_text(config(**fleet.changes).model_dump_json())
    findings = verify(fleet.folder)
    assert [str(breach) for breach in findings.breaches] == [], what
    assert findings.counts["steps finished"] == 3, what


def lines(fleet: FaultyFleet) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (fleet.folder / "metrics.jsonl").read_text().splitlines()]


def rolled_back(fleet: FaultyFleet) -> FaultyFleet:
    fleet.services.readings = {2: [Reading(rule="ppo_kl", network="actor", value=0.3)]}
    return fleet


ROLLBACK = {"guard__ppo_kl": {"rollback": 0.1, "skip": None}}


async def calm_run(folder: Path) -> tuple[FaultyFleet, list[dict[str, Any]]]:
    calm, events = rolled_back(FaultyFleet(folder, CHANGES | ROLLBACK)), list[dict[str, Any]]()
    assert await calm.live(lambda it, event: events.append(event))
    return calm, events


def moments(events: list[dict[str, Any]]) -> list[int]:
    """The events of step 2, which rolls back, validates and saves, and the first of its trajectories."""
    kinds = [event["event"] for event in events]
    ends = [i for i, event in enumerate(events) if event["event"] == "step"]
    return [
        i
        for i in range(ends[1], ends[2])
        if kinds[i] not in ("member", "epoch", "commit") and not kinds[i - 1] == kinds[i] == "trajectory"
    ]


def emptying(
    lose: Callable[[], None], events: list[dict[str, Any]], number: int, killed: str
) -> Callable[[SequencerRun, dict[str, Any]], None]:
    """Has the broker lose data after an event, and kills the controller then, later or never.

    The event is the one that has this number in a calm run: the same kind of the same step for the same time.
    Its own number may be another one, because events of members and samples come in any order.
    """
    kind = _kind(events[number])
    to_come = sum(_kind(event) == kind for event in events[: number + 1])

    def disturb(it: SequencerRun, event: dict[str, Any]) -> None:
        nonlocal to_come
        if not to_come:
            if killed == "in the next phase" and event["event"] == "phase":
                raise Killed
        elif _kind(event) == kind:
            to_come -= 1
            if not to_come:
                lose()
                if killed == "then":
                    raise Killed

    return disturb


def _kind(event: dict[str, Any]) -> tuple[Any, ...]:
    return event["event"], event.get("step"), event.get("to")


@pytest.mark.parametrize("killed", ["never", "then", "in the next phase"])
async def test_redis_comes_back_empty_at_any_event(killed: str, tmp_path: Path) -> None:
    calm, events = await calm_run(tmp_path / "calm")
    phases = {events[i].get("to") for i in moments(events) if events[i]["event"] == "phase"}
    assert phases >= {
        "dispatch",
        "collect",
        "learn",
        "rollback",
        "publish",
        "commit",
        "validate",
        "checkpoint",
    }
    num_sent_back = 0
    for number in moments(events):
        fleet = rolled_back(FaultyFleet(tmp_path / f"{number}", CHANGES | ROLLBACK))
        what = f"{killed}, emptied after {number}: {events[number]}"
        assert await fleet.live(emptying(fleet.empty, events, number, killed)) is (killed == "never"), what
        assert killed == "never" or await fleet.live(nothing), what
        check(fleet, calm, what)
        num_sent_back += fleet.restarts
    assert bool(num_sent_back) is (killed != "never")


@pytest.mark.parametrize(
    ("killed", "share"), [("never", "half"), ("then", "half"), ("in the next phase", "all")]
)
async def test_redis_loses_messages_at_any_event(killed: str, share: str, tmp_path: Path) -> None:
    calm, events = await calm_run(tmp_path / "calm")
    num_restarts = 0
    for number in moments(events):
        fleet = rolled_back(FaultyFleet(tmp_path / f"{number}", CHANGES | ROLLBACK))
        what = f"{killed}, {share} messages lost after {number}: {events[number]}"
        lose = functools.partial(fleet.lose_messages, share)
        assert await fleet.live(emptying(lose, events, number, killed)) is (killed == "never"), what
        assert killed == "never" or await fleet.live(nothing), what
        check(fleet, calm, what)
        num_restarts += fleet.restarts
    assert bool(num_restarts) is (killed != "never")
