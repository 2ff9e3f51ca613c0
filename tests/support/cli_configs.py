"""A small configuration of a run."""

from __future__ import annotations

from paceline.config.load import parse
from paceline.config.run import RunConfig


def config(**sections: object) -> RunConfig:
    tree: dict[str, object] = {
        "data": {"train_files": ["train.parquet"]},
        "model": {"path": "model"},
        "reward": {"functions": [{"name": "exact_match"}]},
        "trainer": {"total_steps": 2},
    }
    return parse(RunConfig, tree | sections)
