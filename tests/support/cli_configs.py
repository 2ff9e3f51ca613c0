"""A small configuration of a run."""

from __future__ import annotations

import shutil
from pathlib import Path

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.runs import run_dir as run_dirs

SEVEN = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
"""config.json of Qwen 2.5 7B, as far as sizes go."""


def config(**sections: object) -> RunConfig:
    tree: dict[str, object] = {
        "data": {"train_files": ["train.parquet"]},
        "model": {"path": "model"},
        "reward": {"functions": [{"name": "exact_match"}]},
        "trainer": {"total_steps": 2},
    }
    return parse(RunConfig, tree | sections)


def accept(run_dir: Path) -> None:
    """Does what a controller does that takes the run on."""
    shutil.copy(run_dir / run_dirs.START, run_dir / run_dirs.RESOLVED)
