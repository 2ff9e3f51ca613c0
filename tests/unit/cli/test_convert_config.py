"""`paceline convert-config`: verl's and TRL's files become ours, and what is left out is said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli.convert.convert import _is_key, convert
from paceline.cli.convert.trl import TRL
from paceline.cli.convert.verl import VERL
from paceline.cli.main import main
from paceline.config.load import load
from paceline.config.run import RunConfig

VERL_FILE = """
data: {train_files: gsm8k/train.parquet, val_files: gsm8k/test.parquet, train_batch_size: 256,
  prompt_key: prompt, max_prompt_length: 512, max_response_length: 1024,
  filter_overlong_prompts: true, truncation: error}
actor_rollout_ref:
  model: {path: models/qwen, use_remove_padding: true, enable_gradient_checkpointing: true}
  actor:
    ppo_mini_batch_size: 64
    ppo_micro_batch_size_per_gpu: 8
    use_kl_loss: true
    kl_loss_coef: 0.002
    kl_loss_type: low_var_kl
    clip_ratio_high: 0.28
    policy_loss: {loss_mode: vanilla}
    optim: {lr: 5.0e-7, lr_warmup_steps_ratio: 0.1, warmup_style: cosine}
    fsdp_config: {param_offload: false}
  rollout: {name: vllm, n: 5, top_k: -1, gpu_memory_utilization: 0.6, val_kwargs: {n: 2, temperature: 0.5}}
algorithm: {adv_estimator: grpo, gamma: 1.0, kl_ctrl: {kl_coef: 0.003}}
custom_reward_function: {path: my/reward.py, name: score}
trainer: {total_training_steps: 90, total_epochs: 15, save_freq: -1, test_freq: 5, logger: [console, wandb],
  experiment_name: gsm8k-qwen, project_name: mine, n_gpus_per_node: 8, resume_mode: disable,
  default_local_dir: "${oc.env:HOME}/x"}
"""
TRL_FILE = """
model_name_or_path: models/qwen
num_generations: 8
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
learning_rate: 1e-6
lr_scheduler_type: cosine_with_restarts
beta: 0.04
epsilon: 0.1
loss_type: dr_grpo
reward_funcs: [my.py:a, my.py:b]
reward_weights: [1.0, 0.5]
max_steps: 70
save_steps: 20
report_to: [wandb]
bf16: true
"""


def command(tmp_path: Path, text: str, *options: str) -> tuple[str, dict[str, Any]]:
    (tmp_path / "theirs.yaml").write_text(text)
    out = tmp_path / "ours.yaml"
    assert main(["convert-config", str(tmp_path / "theirs.yaml"), "--out", str(out), *options]) == 0
    return out.read_text(), yaml.safe_load(out.read_text())


def test_verls_file_is_one_that_a_run_can_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = command(tmp_path, VERL_FILE)
    assert capsys.readouterr().err == ""
    ours = load(RunConfig, tmp_path / "ours.yaml")
    assert (ours.data.ground_truth_key, ours.data.overlong_prompts) == ("reward_model.ground_truth", "filter")
    actor = ours.actor
    assert (actor.ppo_mini_batch_size, actor.use_kl_loss, actor.kl_loss_coef) == (64, True, 0.002)
    assert (actor.kl_loss_type, actor.clip_ratio_high, actor.policy_loss.type) == (
        "low_var_kl",
        0.28,
        "ppo_clip",
    )
    assert (actor.optim.lr, actor.optim.warmup_steps_ratio, actor.optim.lr_scheduler) == (5e-7, 0.1, "cosine")
    assert (actor.memory.recompute, ours.model.path) == ("full", "models/qwen")
    assert (ours.rollout.n, ours.rollout.top_k, ours.rollout.val.n, ours.rollout.val.temperature) == (
        5,
        0,
        2,
        0.5,
    )
    assert (ours.algorithm.adv_estimator, ours.algorithm.kl_ctrl.kl_coef) == ("grpo", 0.003)
    trainer = ours.trainer
    assert (trainer.total_steps, trainer.save_freq, trainer.test_freq) == (90, 0, 5)
    assert (trainer.name, list(trainer.loggers), trainer.resume) == ("gsm8k-qwen", ["wandb"], "never")
    assert [f.name for f in ours.reward.functions] == ["my/reward.py:score"]
    left_out = text.partition("# Not taken over:")[2]
    for key in (
        "ppo_micro_batch_size_per_gpu: 8",
        "total_epochs: 15",
        "fsdp_config.param_offload",
        "${oc.env:HOME}",
    ):
        assert key in left_out
    assert "rollout.n" not in left_out


def test_trls_fields(tmp_path: Path) -> None:
    text, tree = command(tmp_path, TRL_FILE)
    assert "# Missing: data.train_files" in text
    tree["data"] = {"train_files": "train.jsonl", "train_batch_size": 8}
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump(tree))
    ours = load(RunConfig, tmp_path / "ours.yaml")
    assert (ours.rollout.n, ours.actor.ppo_mini_batch_size, ours.trainer.total_steps) == (8, 8, 70)
    assert (ours.actor.use_kl_loss, ours.actor.kl_loss_coef, ours.actor.clip_ratio_low) == (True, 0.04, 0.1)
    assert ours.actor.loss_agg_mode == "seq-mean-token-sum-norm"
    assert (ours.actor.optim.lr, ours.actor.optim.lr_scheduler) == (1e-6, "cosine_with_restarts")
    assert [(f.name, f.weight) for f in ours.reward.functions] == [("my.py:a", 1.0), ("my.py:b", 0.5)]
    assert "bf16: True" in text.partition("# Not taken over:")[2]


def test_every_key_of_ours_that_a_row_sets_exists() -> None:
    """Each row, with a value that it may have."""
    for rows, program in ((VERL, "verl"), (TRL, "trl")):
        for row in rows:
            for key in row.keys:
                tree = convert({key: "1"}, program).tree
                for section, values in tree.items():
                    for name in values if isinstance(values, dict) else ():
                        assert _is_path(f"{section}.{name}"), (key, section, name)


def _is_path(path: str) -> bool:
    section, name = path.split(".")
    below = RunConfig.model_fields[section].annotation
    return name in below.model_fields  # type: ignore[union-attr]


def test_a_section_is_no_key() -> None:
    assert _is_key("actor.optim.lr")
    assert not _is_key("actor.optim")


def test_what_is_no_such_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, words in (
        ("a: [", "is no YAML"),
        ("- 1", "holds no mapping"),
        ("a: 1", "name the program with --from"),
        ("model: {}\nreward: {}", "one of ours already"),
    ):
        (tmp_path / "x.yaml").write_text(text)
        assert main(["convert-config", str(tmp_path / "x.yaml")]) == 2
        assert re.search(words, capsys.readouterr().err)
    (tmp_path / "x.yaml").write_text(TRL_FILE)
    assert main(["convert-config", str(tmp_path / "x.yaml"), "--out", str(tmp_path / "x.yaml")]) == 2
    assert "exists" in capsys.readouterr().err
