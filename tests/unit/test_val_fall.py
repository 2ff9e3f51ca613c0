"""The guard's rule on validations that fall: who is told, when a run goes back or ends, and what is kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import GuardError
from paceline.core.ids import Purpose
from paceline.core.samples.trajectory import PromptGroup
from support.fake_fleet import Answer, FakeServices, score_all
from support.memory_broker import MemoryBroker
from support.sequencer_run import SequencerRun, config, run_of

SETS: dict[str, Any] = {"data__val_sets": {"hard": "hard.jsonl"}, "trainer__test_freq": 1}
OF_HARD = 2
"""The first prompt of the set; those before it are of data.val_files."""


def answers(hard: Mapping[int, float], spread: float = 0.0) -> Answer:
    """Rewards of the set by step, its two prompts `spread` apart from the mean."""

    def answer(group: PromptGroup, index: int) -> dict[str, Any]:
        if group.purpose != Purpose.VALIDATE:
            return score_all(group, index)
        if group.prompt_id < OF_HARD:
            return {"reward": 0.5, "reward_error": None}
        sign = 1 if group.prompt_id == OF_HARD else -1
        return {"reward": hard[group.step] + sign * spread, "reward_error": None}

    return answer


async def went(
    folder: Path,
    answer: Answer,
    *,
    stop_after: int = 0,
    services: FakeServices | None = None,
    **changes: Any,
) -> SequencerRun:
    """A term of a run, to its end or until it is asked to stop after a step."""
    services = services or FakeServices()
    services.standings.clear()
    services.trained.clear()
    async with run_of(config(**SETS | changes), folder, services, MemoryBroker()) as it:
        services.writes = True

        def answering(group: PromptGroup, index: int) -> dict[str, Any]:
            if group.step == stop_after > 0:
                it.sequencer.progress.stop_reason = "SIGINT"
            answered: dict[str, Any] = answer(group, index)  # type: ignore[assignment]
            return answered

        await it.enlist_all()
        await it.go(answering)
    return it


def firings(it: SequencerRun) -> list[tuple[Any, ...]]:
    keys = ("step", "rule", "network", "action", "value", "streak")
    events = [e for e in it.events() if e["event"] == "guard"]
    return [tuple(round(e[k], 6) if k == "value" else e[k] for k in keys) for e in events]


async def test_a_fall_is_told_once_with_its_best_value(tmp_path: Path) -> None:
    rewards = {0: 0.5, 1: 0.8, 2: 0.8, 3: 0.3, 4: 0.2, 5: 0.8, 6: 0.7}
    it = await went(tmp_path, answers(rewards), trainer__total_steps=6)
    assert firings(it) == [
        (3, "val_fall", "hard", "warn", 0.5, 1),
        (4, "val_fall", "hard", "warn", 0.6, 2),
        (6, "val_fall", "hard", "warn", 0.1, 1),
    ]
    told = [text for text in it.notices if "guard" in text]
    gap = "guard: warn: hard: gap below the best validation's interval (mean reward"
    assert told == [
        f"step 3: {gap} 0.3, 0.8 after step 1) is 0.5, above 0 (guard.val_fall.warn)",
        f"step 6: {gap} 0.7, 0.8 after step 1) is 0.1, above 0 (guard.val_fall.warn)",
        "guard: val_fall/hard fired in 3 validations; worst 0.6 in step 4",
    ]
    assert [line["guard/fired"] for line in it.lines()[1:]] == [0, 0, 1, 1, 0, 1]
    assert it.breaches() == []


async def test_intervals_that_touch_are_no_fall(tmp_path: Path) -> None:
    """The prompts of the set are 0.2 apart from their mean, and so are the ends of the interval."""
    rewards = {0: 0.9, 1: 0.55, 2: 0.45}
    it = await went(tmp_path, answers(rewards, spread=0.2), trainer__total_steps=2)
    assert firings(it) == [(2, "val_fall", "hard", "warn", 0.05, 1)]


async def test_a_run_goes_back_in_the_step_after_so_many_falls(tmp_path: Path) -> None:
    """Steps without a validation end no streak; what was saved while it waited is no place to go back to."""
    rewards = {0: 0.5, 2: 0.9, 4: 0.3, 6: 0.2, 8: 0.9}
    changes = {"trainer__test_freq": 2, "guard__val_fall": {"rollback": 0.1, "patience": 2}}
    it = await went(tmp_path, answers(rewards), trainer__total_steps=8, **changes)
    calls = [call for call in it.services.calls if call.startswith(("train", "load"))]
    assert calls[6:9] == ["train 7", "load step_000003 as 7", "train 8"]
    (event,) = [e for e in it.events() if e["event"] == "rollback"]
    assert (event["step"], event["to_step"]) == (7, 3)
    assert "0.9 after step 2) is 0.7, above 0.1 (guard.val_fall.rollback)" in event["reason"]
    assert [a.lr_scale for a in it.services.adjustments] == [*[1.0] * 7, 0.5]
    assert it.breaches() == []


@pytest.mark.parametrize("stop_after", [4, 6])
async def test_a_run_that_goes_on_knows_its_best_its_streak_and_what_is_due(
    stop_after: int, tmp_path: Path
) -> None:
    rewards = {0: 0.5, 2: 0.9, 4: 0.3, 6: 0.2, 8: 0.9}
    changes = {
        "trainer__test_freq": 2,
        "guard__val_fall": {"rollback": 0.1, "patience": 2},
        "trainer__total_steps": 8,
    }
    services = FakeServices()
    await went(tmp_path, answers(rewards), stop_after=stop_after, services=services, **changes)
    it = await went(tmp_path, answers(rewards), services=services, **changes)
    assert [e["term"] for e in it.events() if e["event"] == "run"] == [1, 2]
    assert [e for e in it.events() if e["event"] == "rewind"] == []
    assert [(e["step"], e["to_step"]) for e in it.events() if e["event"] == "rollback"] == [(7, 3)]
    assert [line["step"] for line in it.lines()] == list(range(9))


async def test_a_stop_ends_the_run_after_its_step(tmp_path: Path) -> None:
    rewards = {0: 0.5, 1: 0.9, 2: 0.3, 3: 0.3}
    message = r"step 2: the guard ends the run: stop: hard: gap .* \(guard.val_fall.stop\)\. The weights of "
    changes: dict[str, Any] = {"guard__val_fall": {"stop": 0.1}, "trainer__total_steps": 3}
    with pytest.raises(
        GuardError, match=message + "this step were published; the last good checkpoint is .*1"
    ):
        await went(tmp_path, answers(rewards), **changes)
    again = {**changes, "guard__val_fall": {"stop": 0.7}}
    it = await went(tmp_path, answers(rewards), **again)
    assert [line["step"] for line in it.lines()] == [0, 1, 2, 3]
