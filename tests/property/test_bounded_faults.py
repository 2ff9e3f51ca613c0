"""Random faults in runs with a bound on staleness: no token beyond the bound, none lost, none trained twice.

A fault strikes after a random event of the journal: the controller is killed; servers end, with weights that
nobody else has; the broker comes back empty, or without half of its messages; the learner goes back to its
newest checkpoint. Several faults strike a run.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.controller.batch import collect
from paceline.controller.run import backoff
from paceline.controller.verify.check import verify
from paceline.core.samples.trajectory import PromptGroup
from support.faulty_fleet import FaultyFleet, Killed
from support.sequencer_run import SequencerRun, config

STEPS, ROWS = 7, 6
NUM_SEEDS = int(os.environ.get("PACELINE_FAULT_SEEDS", "4"))
MOST_EVENTS = 230
MOST_SECONDS = 300.0
SERVERS = ("rollout-0", "rollout-1")
QUIET = ("trajectory", "dispatch", "batch", "trained")
"""Events at which no call to a fake member is under way; such a call does not break off."""


def changes(k: int, in_flight: str) -> dict[str, Any]:
    return {
        "rollout__in_flight": in_flight,
        "trainer__total_steps": STEPS,
        "trainer__save_freq": 5,
        "trainer__test_freq": 3,
        "trainer__val_before_train": False,
        "trainer__save_trajectories": False,
        "barrier__mode": "bounded",
        "barrier__max_staleness": k,
        "algorithm__rollout_correction": {"method": "tis"},
        "barrier__stall_timeout_s": 60.0,
        "service__recovery_timeout_s": 60.0,
    }


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "_CHECK_S", 0.03)
    monkeypatch.setattr(collect, "_BLOCK_S", 0.01)
    monkeypatch.setattr(backoff, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(os, "fsync", lambda file: None)


Strike = Callable[[SequencerRun, dict[str, Any]], None]


def faults(fleet: FaultyFleet, rng: random.Random) -> dict[str, Strike]:
    def killed(it: SequencerRun, event: dict[str, Any]) -> None:
        raise Killed

    def all_killed(it: SequencerRun, event: dict[str, Any]) -> None:
        fleet.services.standings.clear()
        raise Killed

    def emptied(it: SequencerRun, event: dict[str, Any]) -> None:
        fleet.empty()
        if rng.random() < 0.5:
            raise Killed

    def halved(it: SequencerRun, event: dict[str, Any]) -> None:
        fleet.lose_messages("half")

    def servers_end(it: SequencerRun, event: dict[str, Any]) -> None:
        fleet.end_servers(it, SERVERS)

    def server_ends(it: SequencerRun, event: dict[str, Any]) -> None:
        fleet.end_servers(it, rng.sample(SERVERS, 1))

    def learner_ends(it: SequencerRun, event: dict[str, Any]) -> None:
        fleet.restart_learner(it, "it was killed")

    strikes = (killed, all_killed, emptied, halved, servers_end, server_ends, learner_ends)
    return {strike.__name__: strike for strike in strikes}


async def faulty_run(k: int, in_flight: str, seed: int, folder: Path, struck: Counter[str]) -> None:
    """One run, from its beginning to its end."""
    rng, fleet = random.Random(f"{k}/{seed}"), FaultyFleet(folder, changes(k, in_flight))
    waiting = random.Random(seed)

    def may_end(group: PromptGroup) -> bool:
        """New weights find about half of the later steps' groups half drawn."""
        return group.step <= fleet.services.version + 1 or waiting.random() < 0.05

    if in_flight != "wait":
        fleet.services.may_end = may_end
    due = sorted(rng.sample(range(20, MOST_EVENTS), 3))
    known, told, number = faults(fleet, rng), list[str](), [0]

    def strike(it: SequencerRun, event: dict[str, Any]) -> None:
        number[0] += 1
        if due and number[0] >= due[0]:
            name = rng.choice(sorted(known))
            if name.endswith(("ends", "end")) and event["event"] not in QUIET:
                return
            due.pop(0)
            told.append(f"{name} after event {number[0]}, {event['event']} of step {event.get('step')}")
            struck[name] += 1
            known[name](it, event)

    try:
        async with asyncio.timeout(MOST_SECONDS):
            while not await fleet.live(strike):
                pass
    except Exception as error:
        raise AssertionError(f"k={k}, seed={seed}: {', '.join(told)}") from error
    check(fleet, k, f"k={k}, seed={seed}: {', '.join(told)}")
    struck["mixed"] += (folder / "events.jsonl").read_text().count('"ranges"')


def check(fleet: FaultyFleet, k: int, what: str) -> None:
    for order in fleet.services.orders:
        assert 0 <= order.policy.staleness_in(order.step) <= k, what
        assert len(order.rows) == ROWS, what
    lines = [json.loads(line) for line in (fleet.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS + 1)), what
    (fleet.folder / "config.resolved.yaml").write_text(config(**fleet.changes).model_dump_json())
    findings = verify(fleet.folder)
    assert [str(breach) for breach in findings.breaches] == [], what
    assert findings.counts["rows trained"] == STEPS * ROWS, what


@pytest.mark.parametrize("in_flight", ["wait", "keep"])
@pytest.mark.parametrize("k", [1, 4])
async def test_random_faults_leave_every_step_whole_and_within_its_bound(
    k: int, in_flight: str, tmp_path: Path
) -> None:
    struck = Counter[str]()
    for seed in range(NUM_SEEDS):
        await faulty_run(k, in_flight, seed, tmp_path / f"{seed}", struck)
    assert (struck.pop("mixed") > 0) == (in_flight == "keep")
    assert struck
