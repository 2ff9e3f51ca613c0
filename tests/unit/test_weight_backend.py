"""What weights travel over."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config.load import parse
from paceline.config.run import RunConfig


def config(**sections: dict[str, Any]) -> RunConfig:
    tree: dict[str, Any] = {
        "data": {"train_files": "train.parquet", "train_batch_size": 64},
        "model": {"path": "model"},
        "reward": {"functions": [{"name": "exact_match"}]},
        "trainer": {"total_steps": 1},
    }
    return parse(RunConfig, tree | sections)


@pytest.mark.parametrize(
    ("learner", "rollout", "device", "expected"),
    [
        ({}, {}, "cpu", "gloo"),
        ({}, {}, "cuda", "nccl"),
        ({"devices": [0, 1]}, {"devices": [2, 3]}, "cuda", "nccl"),
        ({"devices": [0]}, {"devices": [0]}, "cuda", "gloo"),
        ({"devices": [0, 1]}, {"devices": [1, 2]}, "cuda", "gloo"),
    ],
)
def test_auto(learner: dict[str, Any], rollout: dict[str, Any], device: str, expected: str) -> None:
    assert config(learner=learner, rollout=rollout).weight_backend(device) == expected


def test_a_backend_that_is_named_stays() -> None:
    shared = {"learner": {"devices": [0]}, "rollout": {"devices": [0]}, "weights": {"backend": "nccl"}}
    assert config(**shared).weight_backend("cuda") == "nccl"
