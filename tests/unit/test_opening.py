"""Which runs may go on in a directory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.controller.batch.inputs import Inputs
from paceline.controller.run.records.opening import open_run
from paceline.core.clock import SystemClock
from paceline.core.errors import ConfigError
from paceline.core.samples.trajectory import RewardContext
from paceline.data.cursor import PromptCursor
from paceline.data.prompts import Prompt, PromptSet
from support.sequencer_run import config, prompts


def inputs(**changed: Any) -> Inputs:
    """Seven prompts; `changed` are attributes of the second one."""
    train = dict(prompts(7).prompts)
    second: Prompt = dataclasses.replace(train[1], **changed)
    train[1] = second
    return Inputs(
        train=PromptSet(prompts=train, num_filtered=0),
        val=prompts(2),
        cursor=PromptCursor(range(7), batch_size=3, seed=0),
        stop_token_ids=(0,),
    )


def opened(folder: Path, with_inputs: Inputs | None = None, **changes: Any) -> str:
    journal, run_id = open_run(folder, config(**changes), with_inputs or inputs(), SystemClock())
    journal.close()
    return run_id


def test_the_same_run_goes_on_under_its_id_in_the_next_term(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert opened(tmp_path, trainer__total_steps=50, trainer__save_freq=7) == first
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(e["event"], e["term"], e["run_id"]) for e in events] == [("run", 1, first), ("run", 2, first)]
    assert events[0]["data_digest"] == events[1]["data_digest"] == inputs().digest


@pytest.mark.parametrize(
    "changed",
    [
        {"token_ids": np.asarray([1, 2, 4], dtype=np.int32)},
        {"context": RewardContext(ground_truth="other")},
        {"context": RewardContext(ground_truth="1", extra={"level": "\ud800"})},
    ],
)
def test_other_data_are_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    opened(tmp_path)
    with pytest.raises(ConfigError, match=r"begun with other data.*trainer\.run_dir"):
        opened(tmp_path, inputs(**changed))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("trainer__seed", 5, "trainer.seed=5 instead of 0"),
        ("data__train_batch_size", 6, "data.train_batch_size=6 instead of 3"),
        ("rollout__n", 3, "rollout.n=3 instead of 2"),
    ],
)
def test_other_settings_are_refused_by_name(key: str, value: Any, said: str, tmp_path: Path) -> None:
    opened(tmp_path)
    with pytest.raises(ConfigError, match=said):
        opened(tmp_path, **{key: value})


def test_an_earlier_run_is_never_mixed_with_a_new_one(tmp_path: Path) -> None:
    opened(tmp_path, trainer__resume="never")
    with pytest.raises(ConfigError, match="holds an earlier run, and trainer.resume is never"):
        opened(tmp_path, trainer__resume="never")
