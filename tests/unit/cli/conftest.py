"""A working directory with the inputs of a small run."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml


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
