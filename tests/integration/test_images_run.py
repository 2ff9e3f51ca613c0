"""`paceline train` on prompts with images: vLLM and the learner see the same ones, and the tower stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.controller.verify.check import verify
from support.tiny_vl import drawn_image, save_tiny_vl
from support.training_run import REWARDS, training

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.timeout(900)]


def write_rows(folder: Path) -> Path:
    """Eight prompts with one image, two or none."""
    rows = []
    for number in range(8):
        images = [f"{number}_{place}.png" for place in range((1, 2, 0, 1)[number % 4])]
        for place, name in enumerate(images):
            drawn_image(10 * number + place, 56 + 28 * (number % 3), 56).save(folder / name)
        text = "<image>" * len(images) + f"Q{number}?"
        rows.append({"prompt": text, "images": images, "ground_truth": "1"})
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def grpo(folder: Path) -> dict[str, Any]:
    return {
        "data": {
            "train_files": str(write_rows(folder)),
            "image_key": "images",
            "prompt_format": "chat",
            "max_prompt_length": 128,
            "max_response_length": 12,
            "train_batch_size": 8,
        },
        "model": {"path": str(save_tiny_vl(folder / "model", seed=3))},
        "algorithm": {"adv_estimator": "grpo"},
        "actor": {
            "ppo_mini_batch_size": 4,
            "ppo_max_token_len_per_gpu": 512,
            "ratio_audit_freq": 1,
            "optim": {"lr": 1e-4},
        },
        "rollout": {"n": 4, "max_num_seqs": 16},
        "reward": {"functions": [{"name": f"{REWARDS}:letters"}]},
        "trainer": {"name": "images", "total_steps": 3, "save_freq": 3},
        "learner": {"world_size": 2},
    }


def test_a_run_with_images_is_exact_and_leaves_the_tower_as_it_was(tmp_path: Path) -> None:
    with training(grpo(tmp_path), tmp_path / "run") as run:
        assert run.finish(timeout_s=400) == 0
    steps = run.metrics[1:]
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert row["actor/first_ppo_kl"] == 0.0
        assert row["rollout/logprob_diff_max"] < 1e-4
        assert row["actor/grad_norm"] > 0.0
        assert row["actor/skipped_updates"] == 0.0
    assert [str(breach) for breach in verify(run.run_dir).breaches] == []

    started, trained = (tensors(folder) for folder in (tmp_path / "model", run.run_dir / "model"))
    assert started.keys() == trained.keys()
    unchanged = {name for name, data in started.items() if trained[name] == data}
    assert unchanged == {name for name in started if name.startswith("visual.")} != set()


def tensors(folder: Path) -> dict[str, bytes]:
    """A model's tensors as its files name them, bit by bit."""
    from safetensors.numpy import load_file

    return {name: tensor.tobytes() for name, tensor in load_file(folder / "model.safetensors").items()}
