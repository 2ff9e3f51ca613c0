"""Episodes in what is recorded: their texts, their reward, their turns, and what `verify` says of masks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from paceline.controller.run.records import metrics
from paceline.controller.verify.files.trajectory_files import FileCheck
from paceline.controller.verify.rows.trajectory_row import TrajectoryRow
from paceline.core.ids import TrajectoryId
from paceline.core.policy import PolicyTag
from paceline.core.samples.episode import EpisodeOutcome
from paceline.core.samples.trajectory import sampled_spans
from paceline.core.scoring import ScoreItem
from paceline.reward.environment import EnvironmentReward
from paceline.show.report.samples import SampleFiles
from paceline.show.report.token_texts import TokenTexts
from support.headers import scored

OUTCOME = EpisodeOutcome(
    stop_reason="answered", num_turns=2, num_tool_calls=1, tool_s=0.5, reward=2.0, components={"moves": 3.0}
)


@pytest.mark.parametrize(
    ("mask", "spans"),
    [
        ([1, 1, 1], [(0, 3)]),
        ([1, 1, 0, 0, 1], [(0, 2), (4, 5)]),
        ([0, 1, 0], [(1, 2)]),
        ([0, 0], []),
    ],
)
def test_each_run_of_ones_is_a_turn(mask: list[int], spans: list[tuple[int, int]]) -> None:
    assert sampled_spans(np.array(mask, dtype=np.uint8)) == spans


async def test_the_environments_reward_is_one_more_component() -> None:
    item = ScoreItem(trajectory_id="a", prompt="", response="", ground_truth="", episode=OUTCOME)
    plain = dataclasses.replace(item, episode=None)
    unrated = dataclasses.replace(item, episode=dataclasses.replace(OUTCOME, reward=None))
    first, second, third = await EnvironmentReward(0.5).score([item, plain, unrated])
    assert (first.reward, first.components) == (1.0, {"environment": 2.0, "environment/moves": 3.0})
    assert (second.reward, second.components) == (0.0, {})
    assert (third.reward, third.components) == (0.0, {"environment/moves": 3.0})


def test_turns_and_reasons_are_counted() -> None:
    ended = dataclasses.replace(OUTCOME, stop_reason="max_turns", num_turns=4)
    samples = [
        dataclasses.replace(scored(0), episode=OUTCOME),
        dataclasses.replace(scored(0), episode=ended),
    ]
    assert metrics.episode_metrics(samples) == {
        "episode/turns/mean": 3.0,
        "episode/turns/max": 4.0,
        "episode/tool_calls/mean": 1.0,
        "episode/tool_s/mean": 0.5,
        "episode/stop/answered": 0.5,
        "episode/stop/max_turns": 0.5,
    }
    assert metrics.episode_metrics([scored(0)]) == {}


@pytest.mark.parametrize(
    ("mask", "fault"),
    [
        ([1, 0, 1], []),
        ([1, 1, 1], ["has a mask of train:1:3:0 with 3 sampled tokens, 2 were counted"]),
    ],
)
def test_verify_counts_the_masks(tmp_path: Path, mask: list[int], fault: list[str]) -> None:
    table = pyarrow.table(
        {
            "response_mask": pyarrow.array([mask, None], pyarrow.list_(pyarrow.uint8())),
            "num_sampled_tokens": [2, 7],
            "step": [1, 1],
            "prompt_id": [3, 3],
            "sample_index": [0, 1],
            "reward": [1.0, 1.0],
            "policy_version": [0, 0],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "step_000001.parquet")
    check = FileCheck(run_id="r", policy=PolicyTag(version=0, digest="a"), shapes=None, recomputes=True)
    rows = [
        TrajectoryRow(key=TrajectoryId.parse(f"train:1:3:{i}"), digest="", reward=1.0, raw_reward=1.0)
        for i in range(2)
    ]
    assert check.run(tmp_path / "step_000001.parquet", rows) == 2
    assert check.faults == fault
    assert check.num_without_tokens == 1


def test_the_report_tells_turns_tool_calls_and_why_an_episode_ended(tmp_path: Path) -> None:
    table = pyarrow.table(
        {"stop_reason": ["max_turns", None], "num_turns": [3, None], "num_tool_calls": [2, None]}
    )
    pyarrow.parquet.write_table(table, tmp_path / "step_000001.parquet")
    first, second = SampleFiles(tmp_path, TokenTexts([tmp_path])).rows("step_000001")
    assert (first["stop_reason"], first["num_turns"], first["num_tool_calls"]) == ("max_turns", 3, 2)
    assert second["stop_reason"] is None
