"""The controller of a run with validation servers is killed at every event: the run is as undisturbed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.controller.standing import Standing
from paceline.core.ids import Purpose
from paceline.core.samples.trajectory import PromptGroup
from support import killed_sequencer
from support.beside import BESIDE, by_version
from support.fake_fleet import FakeServices
from support.killed_sequencer import breaches_of, journal_events, kills, metrics_lines
from support.memory_broker import MemoryBroker
from support.more import more
from support.sequencer_run import SequencerRun, config

CHANGES: dict[str, Any] = {**BESIDE, "trainer__total_steps": 4, "trainer__save_freq": 3}


def falling(group: PromptGroup, index: int) -> dict[str, Any]:
    """The first validation is the best, so that the guard knows of each whether it was judged."""
    answered = by_version(group, index)
    if group.purpose != Purpose.VALIDATE:
        return answered
    reward = -float(answered["reward"])
    return {**answered, "reward": reward, "components": {"exact_match": reward}}


async def live(
    folder: Path,
    fakes: FakeServices,
    broker: MemoryBroker,
    prepare: Callable[[SequencerRun], None],
    kill: tuple[int, bool] | None = None,
) -> bool:
    return await killed_sequencer.live(
        config(**CHANGES), folder, fakes, broker, falling, kill, prepare=prepare
    )


def at_once(it: SequencerRun) -> None:
    """Validations are over before their step."""


def a_step_later(it: SequencerRun) -> None:
    """Validations of steps 0 and 2 are answered while steps 2 and 3 are trained."""
    it.may_validate = lambda version: it.journal.standing.finished >= min(2, version + 1)


def values(folder: Path) -> dict[int, dict[str, Any]]:
    """What the lines say of each step, without times; there is one line of each validation."""
    by_step: dict[int, dict[str, Any]] = {}
    for line in metrics_lines(folder):
        numbers = {n: v for n, v in line.items() if n.split("/")[0] in ("val", "critic")}
        of_step = by_step.setdefault(line["step"], {})
        assert not of_step.keys() & numbers.keys()
        of_step |= numbers
    return by_step


def standing_of(folder: Path) -> Standing:
    standing = Standing()
    for event in journal_events(folder):
        standing.note(event)
    return standing


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller's end is an exception here, which loses nothing that was written."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    fakes = FakeServices()
    fakes.writes = True
    asyncio.run(live(folder, fakes, MemoryBroker(), at_once))
    assert sorted(values(folder)) == [0, 1, 2, 3, 4]
    return folder


@pytest.mark.parametrize("prepare", [a_step_later, *more(at_once)])
@pytest.mark.parametrize("written", [False, *more(True)])
async def test_a_controller_killed_at_any_event_goes_on(
    undisturbed: Path, tmp_path: Path, written: bool, prepare: Callable[[SequencerRun], None]
) -> None:
    calm = tmp_path / "calm"
    calm.mkdir()
    fakes = FakeServices()
    fakes.writes = True
    assert await live(calm, fakes, MemoryBroker(), prepare)
    expected, recorded = values(undisturbed), journal_events(calm)
    assert values(calm) == expected
    too_late = 0
    for number in kills(recorded, written=written):
        what = f"killed at {number}: {recorded[number]}"
        folder, fakes, broker = tmp_path / f"{number}", FakeServices(), MemoryBroker()
        folder.mkdir()
        fakes.writes = True
        if await live(folder, fakes, broker, prepare, (number, written)):
            # What goes on at the same time varies in order and in its number of events: this run had fewer.
            assert number >= len(journal_events(folder)), what
            too_late += 1
            continue
        assert breaches_of(folder, config(**CHANGES)) == [], what
        assert await live(folder, fakes, broker, prepare), what
        assert breaches_of(folder, config(**CHANGES)) == [], what
        assert values(folder) == expected, what
        assert [step for step, _ in fakes.trained] == [1, 2, 3, 4], what
        events = journal_events(folder)
        assert [e["step"] for e in events if e["event"] == "validation_skipped"] == [], what
        standing = standing_of(folder)
        assert (standing.finished, standing.validations) == (4, {}), what
        assert standing.guard["best"] == standing_of(calm).guard["best"], what
    assert too_late <= len(recorded) // 8
