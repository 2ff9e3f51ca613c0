"""A working directory with the inputs of a small run, and checks that cost less than those of a command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from paceline.checks import model_checks, reward_checks, rollout_checks, service_checks
from support import forked


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with data, a model folder without a tokenizer, and a configuration."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i} + 1 =", "ground_truth": str(i + 1)} for i in range(80)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(
        json.dumps(
            {
                "model_type": "qwen2",
                "hidden_size": 48,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
                "architectures": ["Tiny"],
                "eos_token_id": 1,
            }
        )
    )
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # no tensors
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump(
            {
                "data": {"train_files": "train.parquet", "max_prompt_length": 32, "max_response_length": 8},
                "model": {"path": "model"},
                "reward": {"functions": [{"name": "exact_match"}]},
                "trainer": {"total_steps": 2},
                "learner": {"device": "cpu"},
            }
        )
    )
    return tmp_path


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of learner and engine start processes that import torch, which takes seconds."""
    monkeypatch.setattr(model_checks, "self_test", lambda config, kept: "the line of the learner")
    monkeypatch.setattr(rollout_checks, "engine_log_probs", lambda config, kept: "the line of the engine")
    monkeypatch.setattr(reward_checks, "_example_reward", lambda config, val_set: "")


@pytest.fixture
def forked_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The services' checks are forks of a process that has imported torch."""

    def run(command: Sequence[str], *, timeout: float, **_: object) -> subprocess.CompletedProcess[str]:
        assert command[0] == sys.executable
        return forked.run(command[1:], timeout=timeout)

    own = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(service_checks, "subprocess", own)
