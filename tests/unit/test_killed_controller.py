"""The controller is killed at every event of its journal and started again: the run is the one undisturbed.

What it held in memory is gone; the broker, the files and the members stay. A fake learner trains each step
once, whatever it is asked.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.controller.standing import Standing
from paceline.core.guard import Reading
from support import killed_sequencer
from support.fake_fleet import FakeServices
from support.killed_sequencer import TRANSPORT, breaches_of, kills
from support.killed_sequencer import journal_events as events
from support.killed_sequencer import metrics_lines as lines
from support.memory_broker import MemoryBroker
from support.more import more
from support.sequencer_run import config
from support.training_run import assert_same_metrics

CHANGES: dict[str, Any] = {
    "trainer__total_steps": 3,
    "trainer__save_freq": 2,
    "trainer__test_freq": 2,
    "algorithm__dynamic_sampling": {"enable": True, "max_extra_factor": 1.0},
    "algorithm__adv_estimator": "rloo",
    "data__val_sets": {"hard": {"files": "hard.jsonl", "n": 2, "temperature": 1.0}},
}


def some_are_equal(group: Any, index: int) -> dict[str, Any]:
    """Every third prompt's samples are worth the same, so that it is replaced."""
    reward = 1.0 if group.prompt_id % 3 == 0 else float(index)
    return {"reward": reward, "reward_error": None, "components": {"exact_match": reward}}


async def live(
    folder: Path,
    fakes: FakeServices,
    broker: MemoryBroker,
    kill: tuple[int, bool] | None,
    changes: dict[str, Any] = CHANGES,
) -> bool:
    """One life of a controller; returns whether it reached the end."""
    return await killed_sequencer.live(config(**changes), folder, fakes, broker, some_are_equal, kill)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller's end is an exception here, which loses nothing that was written."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    fakes = FakeServices()
    fakes.writes = True
    asyncio.run(live(folder, fakes, MemoryBroker(), None))
    assert [line["step"] for line in lines(folder)] == [0, 1, 2, 3]
    assert any(event["event"] == "refill" for event in events(folder))
    return folder


@pytest.mark.parametrize("written", [False, *more(True)])
async def test_a_controller_killed_at_any_event_goes_on(
    undisturbed: Path, tmp_path: Path, written: bool
) -> None:
    expected, recorded = lines(undisturbed), events(undisturbed)
    for number in kills(recorded, written=written):
        folder, fakes, broker = tmp_path / f"{number}", FakeServices(), MemoryBroker()
        folder.mkdir()
        fakes.writes = True
        assert not await live(folder, fakes, broker, (number, written)), number
        assert await live(folder, fakes, broker, None), number
        what = f"killed at {number}: {recorded[number]}"
        assert_same_metrics(lines(folder), expected, without=TRANSPORT)
        assert [step for step, _ in fakes.trained] == [1, 2, 3], what
        assert [digest for _, digest in fakes.trained] == digests(undisturbed), what
        assert [e["n"] for e in events(folder)] == list(range(len(events(folder)))), what
        assert standing(folder).finished == 3, what
        assert breaches(folder) == [], what


async def test_a_step_that_another_controller_finishes_is_judged_by_the_settings_of_the_first(
    tmp_path: Path,
) -> None:
    """Killed between the checkpoint and the end of step 2; the next controller saves files, of step 3."""
    unsaved = {**CHANGES, "trainer__save_trajectories": False}
    fakes, broker = FakeServices(), MemoryBroker()
    fakes.writes = True
    (tmp_path / "calm").mkdir()
    assert await live(tmp_path / "calm", fakes, broker, None, unsaved)
    recorded = events(tmp_path / "calm")
    number = next(e["n"] for e in recorded if e["event"] == "step" and e["step"] == 2)
    folder, fakes, broker = tmp_path / "killed", FakeServices(), MemoryBroker()
    folder.mkdir()
    fakes.writes = True
    assert not await live(folder, fakes, broker, (number, False), unsaved)
    assert await live(folder, fakes, broker, None)
    assert [step for step, _ in fakes.trained] == [1, 2, 3]
    names = sorted(path.name for path in (folder / "trajectories").iterdir())
    assert names == ["step_000003.parquet", "val_000003.parquet"]
    assert breaches(folder) == []


async def test_a_controller_killed_in_a_rollback_goes_back_to_the_same_weights(tmp_path: Path) -> None:
    changes = {**CHANGES, "guard__ppo_kl": {"rollback": 0.1, "skip": None}}

    def guarded() -> FakeServices:
        fakes = FakeServices()
        fakes.writes = True
        fakes.readings = {2: [Reading(rule="ppo_kl", network="actor", value=0.3)]}
        return fakes

    (tmp_path / "calm").mkdir()
    assert await live(tmp_path / "calm", guarded(), MemoryBroker(), None, changes)
    recorded = events(tmp_path / "calm")
    rollback = next(i for i, event in enumerate(recorded) if event["event"] == "rollback")
    assert recorded[rollback]["to_step"] == 0
    for number in range(rollback - 5, rollback + 8):
        folder, fakes, broker = tmp_path / f"{number}", guarded(), MemoryBroker()
        folder.mkdir()
        assert not await live(folder, fakes, broker, (number, True), changes), number
        assert await live(folder, fakes, broker, None, changes), number
        assert_same_metrics(lines(folder), lines(tmp_path / "calm"), without=TRANSPORT)
        assert [step for step, _ in fakes.trained] == [1, 2, 3]
        commits = {e["version"]: e["digest"] for e in events(folder) if e["event"] == "commit"}
        assert commits[2] == commits[0] != commits[1]
        assert breaches(folder) == []


def digests(folder: Path) -> list[str]:
    return [e["digest"] for e in events(folder) if e["event"] == "trained"]


def standing(folder: Path) -> Standing:
    after = Standing()
    for event in events(folder):
        after.note(event)
    return after


def breaches(folder: Path) -> list[str]:
    return breaches_of(folder, config(**CHANGES))


def weighed(weight: float | None) -> dict[str, Any]:
    """Changes with a set whose own reward is its component, so many times; None: it has no own reward."""
    own = {"functions": [{"name": "exact_match", "weight": weight}]}
    hard = {"files": "hard.jsonl", "n": 2, "temperature": 1.0} | ({} if weight is None else {"reward": own})
    return {**CHANGES, "data__val_sets": {"hard": hard}, "algorithm__dynamic_sampling": {}}


def scored_by(weight: float | None) -> Any:
    """What a reward service with this weight of the set answers."""

    def answer(group: Any, index: int) -> dict[str, Any]:
        value = float(index)
        reward = value * (weight or 1.0) if group.context.val_set == "hard" else value
        return {"reward": reward, "reward_error": None, "components": {"exact_match": value}}

    return answer


@pytest.mark.parametrize(("first", "then"), [(2.0, 3.0), (2.0, None), (None, 3.0)])
async def test_a_reward_that_changes_in_mid_validation_is_no_breach(
    tmp_path: Path, first: float | None, then: float | None
) -> None:
    """Answers that were scored before the kill count, although the set's reward has another weight by now."""

    async def live(folder: Path, weight: float | None, kill: tuple[int, bool] | None = None) -> bool:
        fakes.writes = True
        changes = config(**weighed(weight))
        return await killed_sequencer.live(changes, folder, fakes, broker, scored_by(weight), kill)

    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
    fakes, broker = FakeServices(), MemoryBroker()
    assert await live(tmp_path / "calm", first)
    number = next(e["n"] for e in events(tmp_path / "calm") if str(e.get("id")).startswith("validate:2:3:"))
    folder, fakes, broker = tmp_path / "killed", FakeServices(), MemoryBroker()
    assert not await live(folder, first, (number, True))
    assert await live(folder, then)
    asked = [e["step"] for e in events(folder) if e["event"] == "validate"]
    assert asked == [0, 2, 2, 3]
    assert breaches_of(folder, config(**weighed(then))) == []
