"""Groups that teach nothing or are lost: replaced within their step, or left out of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.controller.run.records.checkpoints import ControllerState
from paceline.core.errors import DataError
from paceline.data.cursor import PromptCursor
from paceline.data.mixture import MixtureState, PromptMixture
from support.fake_fleet import Answer
from support.sequencer_run import run

SAMPLING = {"algorithm__dynamic_sampling": {"enable": True, "max_extra_factor": 1.0}}


def only_some_teach(*teaching: int) -> Answer:
    """All samples of a prompt are worth 1, but for these prompts'."""
    return lambda group, index: {
        "reward": 1.0 if group.prompt_id not in teaching else float(index),
        "reward_error": None,
    }


async def test_groups_of_equal_scores_are_replaced_within_their_step(tmp_path: Path) -> None:
    walk = PromptCursor(range(7), seed=0).take(7)
    async with run(tmp_path, trainer__val_before_train=False, **SAMPLING) as it:
        await it.enlist_all()
        await it.go(only_some_teach(walk[0], walk[2], walk[5], walk[6]))
        first, second = it.services.batches
        # Step 1: 0 1 2 of the walk, 3 for 1, 4 for 3, 5 for 4. Step 2 has one prompt left of the epoch and
        # begins the next one.
        assert sorted({p for p, _ in first}) == sorted(walk[i] for i in (0, 2, 5))
        assert len(first) == 6
        refills = [e for e in it.events() if e["event"] == "refill" and e["step"] == 1]
        assert [e["prompts"] for e in refills] == [[walk[3]], [walk[4]], [walk[5]]]
        assert [e["set_aside"] for e in refills] == [[[walk[i], 1.0]] for i in (1, 3, 4)]
        assert {e["reason"] for e in refills} == {"degenerate"}
        assert {p for p, _ in second} < {walk[i] for i in (0, 2, 5, 6)}
        metrics = it.lines()[1]
        assert metrics["dynamic_sampling/extra_prompts"] == 3
        assert metrics["dynamic_sampling/kept_share"] == 0.5
        assert metrics["dynamic_sampling/reward_mean"] == 0.75
        assert metrics["barrier/groups_dropped"] == 0
        assert not [e for e in it.events() if e["event"] in ("group_dropped", "batch_short")]
        assert it.breaches() == []
        # The checkpoint stands behind what the refill drew.
        state = ControllerState.from_plain(json.loads(it.services.saved[0]))
        assert state.cursor == MixtureState.of_one(epoch=0, position=6)


async def test_a_refill_that_crosses_an_epoch_skips_no_prompt(tmp_path: Path) -> None:
    cursor = PromptMixture({"": range(7)}, batch_size=7, seed=8)
    assert (cursor.take(1), cursor.take(2)) == ([3, 0, 6, 5, 1, 2, 4], [3, 4, 5, 6, 0, 1, 2])
    changes = {"trainer__val_before_train": False, "trainer__total_steps": 3, "data__seed": 8}
    async with run(tmp_path, **changes, **SAMPLING) as it:
        await it.enlist_all()
        await it.go(only_some_teach(0, 3, 4, 6))
        # 5, 1 and 2 of step 2 teach nothing: 4 ends the epoch; the next one begins with 3, and 4 and 5 are
        # the step's own. Step 3 takes the rest of it.
        refills = [e["prompts"] for e in it.events() if e["event"] == "refill" and e["step"] == 2]
        assert refills == [[4], [3], [6]]
        asked = [e["prompts"] for e in it.events() if e["event"] == "dispatch"]
        assert asked == [[0, 3, 6], [1, 2, 5], [0, 1, 2]]
        assert [sorted({prompt for prompt, _ in batch}) for batch in it.services.batches[:2]] == [
            [0, 3, 6],
            [3, 4, 6],
        ]
        state = ControllerState.from_plain(json.loads(it.services.saved[1]))
        assert state.cursor == MixtureState.of_one(epoch=1, position=4)
        assert it.breaches() == []


async def test_the_step_goes_on_with_fewer_groups_when_the_bound_is_spent(tmp_path: Path) -> None:
    walk = PromptCursor(range(7), seed=0).take(7)
    async with run(tmp_path, trainer__val_before_train=False, trainer__total_steps=1, **SAMPLING) as it:
        await it.enlist_all()
        await it.go(only_some_teach(walk[4]))
        assert {p for p, _ in it.services.batches[0]} == {walk[4]}
        (short,) = [e for e in it.events() if e["event"] == "batch_short"]
        assert (short["groups"], short["wanted"], short["extra"]) == (1, 3, 3)
        (notice,) = [text for text in it.notices if text.startswith("step")]
        assert notice.startswith(
            "step 1: 1 of 3 prompt groups have scores that differ, after 3 further prompts"
        )
        assert it.breaches() == []


async def test_a_step_in_which_nothing_teaches_ends_the_run(tmp_path: Path) -> None:
    async with run(tmp_path, trainer__val_before_train=False, **SAMPLING) as it:
        await it.enlist_all()
        with pytest.raises(
            DataError, match="0 of 3 prompt groups.*nothing to learn from.*too hard or all too easy"
        ):
            await it.go(only_some_teach())
