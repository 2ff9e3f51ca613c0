"""Runs with a bound on staleness under random faults: no token beyond it, none lost, none trained twice.

A fault strikes after a random event of the journal: the controller is killed; servers end, with weights that
nobody else has; the broker comes back empty, or without half of its messages; samples come twice, or from
weights beyond the bound; the learner goes back to its newest checkpoint. Several faults strike a run.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from paceline.controller.batch import collect
from paceline.controller.run import backoff
from paceline.controller.verify.check import verify
from paceline.core.policy import PolicyTag
from paceline.core.samples.trajectory import PromptGroup, ScoredHeader
from support.faulty_fleet import FaultyFleet, Killed
from support.sequencer_run import SequencerRun, config

STEPS, ROWS = 7, 6
MOST_FAULTS = 6
MOST_EVENTS_BETWEEN = 60
MOST_SECONDS = 300.0
SERVERS = ("rollout-0", "rollout-1")
QUIET = ("trajectory", "dispatch", "batch", "trained")
"""Events at which no call to a fake member is under way; such a call does not break off."""

Strike = Callable[[SequencerRun, dict[str, Any]], None]


def changes(k: int, in_flight: str, *, replays: bool = False) -> dict[str, Any]:
    """A run's; with `replays` its steps train groups of earlier ones again."""
    replay = {"prompts_per_step": 2, "filter_probability": 0.9, "max_age": 3} if replays else {}
    return {
        "algorithm__replay": replay,
        "rollout__in_flight": in_flight,
        "trainer__total_steps": STEPS,
        "trainer__save_freq": 5,
        "trainer__test_freq": 3,
        "trainer__val_before_train": False,
        "trainer__save_trajectories": replays,
        "barrier__mode": "bounded",
        "barrier__max_staleness": k,
        "algorithm__rollout_correction": {"method": "tis"},
        "barrier__stall_timeout_s": 60.0,
        "service__recovery_timeout_s": 60.0,
    }


@contextmanager
def quick() -> Iterator[None]:
    """A controller that looks around more often, and does not wait for the disk."""
    with ExitStack() as stack:
        for module, name, value in (
            (collect, "_CHECK_S", 0.03),
            (collect, "_BLOCK_S", 0.01),
            (backoff, "_FIRST_PAUSE_S", 0.01),
            (os, "fsync", lambda file: None),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


@dataclass(kw_only=True)
class Faults:
    """What can strike a run, and what has.

    Attributes:
        struck: how often each fault did.
        told: the same in words, in order.
    """

    fleet: FaultyFleet
    rng: random.Random
    struck: Counter[str] = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)
    number: int = 0
    due: int = 0

    def __post_init__(self) -> None:
        self.due = self.rng.randint(5, MOST_EVENTS_BETWEEN)

    def at(self, it: SequencerRun, event: dict[str, Any]) -> None:
        """Strikes, if a fault is due after this event."""
        self.number += 1
        if self.number < self.due or len(self.told) == MOST_FAULTS:
            return
        strike = self.rng.choice(STRIKES)
        if strike.__name__.endswith(("ends", "end")) and event["event"] not in QUIET:
            return
        self.due = self.number + self.rng.randint(5, MOST_EVENTS_BETWEEN)
        where = f"event {self.number}, {event['event']} of step {event.get('step')}"
        self.told.append(f"{strike.__name__} after {where}")
        self.struck[strike.__name__] += 1
        strike(self, it)

    def killed(self, it: SequencerRun) -> None:
        raise Killed

    def all_killed(self, it: SequencerRun) -> None:
        self.fleet.services.standings.clear()
        raise Killed

    def emptied(self, it: SequencerRun) -> None:
        self.fleet.empty()
        if self.rng.random() < 0.5:
            raise Killed

    def halved(self, it: SequencerRun) -> None:
        self.fleet.lose_messages("half")

    def servers_end(self, it: SequencerRun) -> None:
        self.fleet.end_servers(it, SERVERS)

    def server_ends(self, it: SequencerRun) -> None:
        self.fleet.end_servers(it, self.rng.sample(SERVERS, 1))

    def learner_ends(self, it: SequencerRun) -> None:
        self.fleet.restart_learner(it, "it was killed")

    def repeated(self, it: SequencerRun) -> None:
        """All that has come comes again."""
        self.fleet.send(self.fleet.scored_headers())

    def beyond_the_bound(self, it: SequencerRun) -> None:
        """Samples of all steps to come, from weights that are one version too old, or of another digest."""
        bound = it.config.barrier.bound
        for header in self.fleet.scored_headers()[-ROWS:]:
            for step in range(1, STEPS + 1):
                tag = PolicyTag(version=max(0, step - 2 - bound), digest=header.policy.digest[::-1])
                self.fleet.send([_otherwise(header, step, tag)])


STRIKES: tuple[Callable[[Faults, SequencerRun], None], ...] = (
    Faults.killed,
    Faults.all_killed,
    Faults.emptied,
    Faults.halved,
    Faults.servers_end,
    Faults.server_ends,
    Faults.learner_ends,
    Faults.repeated,
    Faults.beyond_the_bound,
)


def _otherwise(header: ScoredHeader, step: int, tag: PolicyTag) -> ScoredHeader:
    return replace(header, trajectory_id=replace(header.trajectory_id, step=step), policy=tag, ranges=())


async def faulty_run(
    k: int, in_flight: str, seed: int, folder: Path, *, replays: bool = False
) -> Counter[str]:
    """One run, from its beginning to its end; returns how often each fault struck.

    Under "mixed" it counts the samples of more than one version, under "again" those that were trained again.

    Raises:
        AssertionError: the run did not end in order, or not within its bound; names all faults.
    """
    fleet = FaultyFleet(folder, changes(k, in_flight, replays=replays))
    faults, waiting = Faults(fleet=fleet, rng=random.Random(f"{k}/{seed}")), random.Random(seed)

    def may_end(group: PromptGroup) -> bool:
        """New weights find about half of the later steps' groups half drawn."""
        return group.step <= fleet.services.version + 1 or waiting.random() < 0.05

    if in_flight != "wait":
        fleet.services.may_end = may_end
    try:
        async with asyncio.timeout(MOST_SECONDS):
            while not await fleet.live(faults.at):
                pass
        again = check(fleet, k)
    except Exception as error:
        raise AssertionError(f"k={k}, {in_flight}, seed={seed}: {'; '.join(faults.told)}: {error}") from error
    mixed = (folder / "events.jsonl").read_text().count('"ranges"')
    return faults.struck + Counter({"mixed": mixed, "again": again})


def check(fleet: FaultyFleet, k: int) -> int:
    """Looks at what the learner was given, and has the record verified; returns how much is trained again."""
    for order in fleet.services.orders:
        assert 0 <= order.policy.staleness_in(order.step) <= k, f"step {order.step} trained {order.policy}"
        fresh = [row for row in order.rows if row.trajectory_id.step == order.step]
        assert len(fresh) == ROWS, f"step {order.step} trained {len(fresh)} rows of its own"
        assert all(0 <= order.step - row.trajectory_id.step <= 3 for row in order.rows)
    lines = [json.loads(line) for line in (fleet.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS + 1)), "a step is missing, or is there twice"
    (fleet.folder / "config.resolved.yaml").write_text(config(**fleet.changes).model_dump_json())
    findings = verify(fleet.folder)
    breaches = [str(breach) for breach in findings.breaches]
    assert not breaches, breaches
    assert findings.counts["rows trained"] == STEPS * ROWS
    return findings.counts["rows trained again"]
