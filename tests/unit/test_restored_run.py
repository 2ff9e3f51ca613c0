"""A run that is gone on with from a copy of its folder, made while it ran: the docs' backup."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.core.members import LearnerState, MemberKind
from paceline.core.run_record.manifest import MANIFEST
from support.fake_fleet import FakeServices
from support.memory_broker import MemoryBroker
from support.sequencer_run import SequencerRun, config, run_of
from support.training_run import is_time

CHANGES: dict[str, Any] = {
    "trainer__test_freq": 0,
    "trainer__save_freq": 2,
    "trainer__total_steps": 8,
    "trainer__save_trajectories": False,
}


async def run_to_the_end(
    folder: Path, services: FakeServices, *, copies: Path | None = None, sent_back: list[str] | None = None
) -> SequencerRun:
    """Runs with an empty broker; copies the folder in each step that is trained."""
    starting: list[asyncio.Task[None]] = []

    async def start_again(reason: str) -> None:
        assert sent_back is not None
        sent_back.append(reason)
        await it.supervisor.apply(it.supervisor.fleet.leave("learner", "a", reason))
        load_newest(folder, services)
        await it.enlist("learner", MemberKind.LEARNER, LearnerState.READY, "b")

    async with run_of(config(**CHANGES), folder, services, MemoryBroker()) as it:
        services.writes = True
        honest = services.learner.train

        async def train(member: Any, order: Any) -> Any:
            if copies is not None:
                shutil.copytree(folder, copies / str(order.step))
            return await honest(member, order)

        services.learner.train = train  # type: ignore[method-assign]
        services.restarted = lambda reason: starting.append(asyncio.create_task(start_again(reason)))
        await it.enlist_all()
        await it.go()
        return it


def numbers(it: SequencerRun) -> list[dict[str, float]]:
    return [{name: v for name, v in row.items() if not is_time(name)} for row in it.lines()]


def load_newest(folder: Path, services: FakeServices) -> None:
    """What a learner does that starts: it loads the newest checkpoint of a folder."""
    steps = [int(each.parent.name[-6:]) for each in folder.glob(f"checkpoints/step_*/{MANIFEST}")]
    services.version = services.source = max(steps, default=0)
    services.trained.clear()


@pytest.mark.parametrize(("checkpoints", "rest"), [(5, 5), (5, 6), (3, 6), (2, 8), (6, 5), (5, 4), (8, 4)])
async def test_the_checkpoints_may_be_copied_earlier_or_later_than_the_rest(
    checkpoints: int, rest: int, tmp_path: Path
) -> None:
    """A copy takes time, and the run goes on meanwhile."""
    copies = tmp_path / "copies"
    expected = await run_to_the_end(tmp_path / "run", FakeServices(), copies=copies)
    restored = tmp_path / "restored"
    shutil.copytree(copies / str(rest), restored, ignore=shutil.ignore_patterns("checkpoints"))
    if (kept := copies / str(checkpoints) / "checkpoints").exists():
        shutil.copytree(kept, restored / "checkpoints")
    services, sent_back = FakeServices(), list[str]()
    load_newest(restored, services)
    it = await run_to_the_end(restored, services, sent_back=sent_back)
    assert bool(sent_back) == (rest == 4)
    assert it.sequencer.result == "8 steps done"
    assert numbers(it) == numbers(expected)
    assert it.breaches() == []
