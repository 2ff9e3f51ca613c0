"""`paceline train` without fakes on prompts with images: GRPO with a tiny random Qwen2.5-VL or Qwen3-VL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import forked
from support.tiny_vl import drawn_image, save_tiny_vl
from support.training_run import assert_sound, tiny_config, training

pytestmark = [pytest.mark.e2e, pytest.mark.more, pytest.mark.timeout(900)]

NUM_STEPS, NUM_PROMPTS, NUM_SAMPLES = 2, 4, 4


def image_inputs(folder: Path, kind: str) -> Path:
    """Eight prompts with none, one or two of five images."""
    save_tiny_vl(folder / "model", seed=3, kind=kind)
    (folder / "data").mkdir()
    for number in range(5):
        drawn_image(number, 70 + 14 * number, 56).save(folder / "data" / f"{number}.png")
    rows: list[dict[str, Any]] = []
    for number in range(8):
        images = [f"{(number + i) % 5}.png" for i in range(number % 3)]
        rows.append({"prompt": f"Letters {number}?", "ground_truth": "", "images": images})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for split in ("train", "val"):
        (folder / "data" / f"{split}.jsonl").write_text(text)
    return folder


@pytest.mark.parametrize("vision", ["none", "all"])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_grpo_with_images(tmp_path: Path, kind: str, vision: str) -> None:
    inputs = image_inputs(tmp_path / "inputs", kind)
    tree = tiny_config(
        inputs,
        data={
            "train_files": str(inputs / "data/train.jsonl"),
            "val_files": str(inputs / "data/val.jsonl"),
            "image_key": "images",
            "prompt_format": "chat",
            "max_prompt_length": 160,
            "max_response_length": 12,
            "train_batch_size": NUM_PROMPTS,
        },
        model={"vision": {"train": vision}},
        algorithm={"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed"}},
        actor={
            "ppo_mini_batch_size": NUM_PROMPTS,
            "ppo_max_token_len_per_gpu": 2048,
            "use_kl_loss": True,
            "ratio_audit_freq": 1,
        },
        rollout={"n": NUM_SAMPLES, "max_num_seqs": 8},
        trainer={"name": "images", "total_steps": NUM_STEPS, "save_freq": 2, "export_model": False},
    )
    with training(tree, tmp_path / "run", forked=True) as run:
        assert run.finish() == 0, run.output
    assert [row["step"] for row in run.metrics] == list(range(NUM_STEPS + 1))
    for row in run.metrics[1:]:
        assert abs(row["actor/ppo_kl"]) < 1e-6
        assert row["actor/first_ppo_kl"] == 0.0
        # The learner sees the images that the engine saw, with the same weights, after every push.
        assert row["rollout/logprob_diff_max"] < 1e-4
        assert row["rollout/mismatch_kl"] < 1e-8
        assert row["barrier/admitted"] == NUM_PROMPTS * NUM_SAMPLES
        assert row["barrier/rejected"] == row["barrier/groups_dropped"] == 0
        assert row["actor/grad_norm"] > 0
    assert_sound(run)
    # As `paceline train` exports its last step, but with its imports made.
    exported = forked.run(
        ["-m", "paceline.learner.export", run.run_dir, str(NUM_STEPS), tmp_path / "out"], timeout=300
    )
    assert exported.returncode == 0, exported.stderr
    started, trained = (tensors(folder) for folder in (inputs / "model", tmp_path / "out"))
    assert started.keys() == trained.keys()
    unchanged = {name for name, data in started.items() if trained[name] == data}
    tower = {name for name in started if "visual." in name}
    assert tower
    assert unchanged == (tower if vision == "none" else set())


def tensors(folder: Path) -> dict[str, bytes]:
    """A model's tensors as its files name them, bit by bit."""
    from safetensors.numpy import load_file

    return {name: tensor.tobytes() for name, tensor in load_file(folder / "model.safetensors").items()}
