"""`paceline convert-config`: verl's and TRL's files become ours, and what is left out is said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli.convert import trl, verl
from paceline.cli.convert.convert import _flat, _is_key, convert
from paceline.cli.main import main
from paceline.config.load import load, parse
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
    assert (ours.actor.use_kl_loss, ours.actor.kl_loss_coef) == (True, 0.04)
    clip = ours.actor.loss_arguments
    assert (clip["clip_low"], clip["clip_high"]) == (0.1, 0.1), "TRL's epsilon is both sides"
    assert ours.actor.loss_agg_mode == "seq-mean-token-sum-norm"
    assert (ours.actor.optim.lr, ours.actor.optim.lr_scheduler) == (1e-6, "cosine_with_restarts")
    assert [(f.name, f.weight) for f in ours.reward.functions] == [("my.py:a", 1.0), ("my.py:b", 0.5)]
    assert "bf16: True" in text.partition("# Not taken over:")[2]


ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
LOSS, NOT_TAKEN = f"{ACTOR}.policy_loss.loss_mode", None
FROM_VERL: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    # Prefixes.
    ({f"{ACTOR}.clip_ratio_high": 0.28}, {"actor.clip_ratio_high": 0.28}),
    ({f"{ROLLOUT}.n": 5}, {"rollout.n": 5}),
    ({f"{MODEL}.lora.rank": 8}, {"model.lora.rank": 8}),
    ({"algorithm.lam": 0.95}, {"algorithm.lam": 0.95}),
    ({"critic.grad_clip": 0.5}, {"critic.grad_clip": 0.5}),
    ({"data.train_batch_size": 128}, {"data.train_batch_size": 128}),
    ({"trainer.total_steps": 9}, {"trainer.total_steps": 9}),
    # Rows.
    ({f"{MODEL}.path": "m"}, {"model.path": "m"}),
    ({"data.reward_fn_key": "kind"}, {"data.data_source_key": "kind"}),
    (
        {"data.train_files": "t.parquet"},
        {"data.train_files": "t.parquet", "data.ground_truth_key": "reward_model.ground_truth"},
    ),
    ({"data.filter_overlong_prompts": True}, {"data.overlong_prompts": "filter"}),
    ({"data.filter_overlong_prompts": False}, {"data.overlong_prompts": "error"}),
    (
        {"custom_reward_function.path": "r.py"},
        {"reward.functions": [{"name": "r.py:compute_score"}], "data.extra_keys": ["extra_info"]},
    ),
    (
        {"custom_reward_function.path": "r.py", "custom_reward_function.name": "f"},
        {"reward.functions": [{"name": "r.py:f"}], "data.extra_keys": ["extra_info"]},
    ),
    ({"custom_reward_function.path": None}, {}),
    ({f"{ACTOR}.ppo_mini_batch_size": 32}, {"actor.ppo_mini_batch_size": 32}),
    *(
        ({f"{section}.{name}": 8}, NOT_TAKEN)
        for section in (ACTOR, "critic")
        for name in (
            *("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz"),
            *("forward_micro_batch_size", "forward_micro_batch_size_per_gpu"),
        )
    ),
    *(
        ({f"actor_rollout_ref.{section}.log_prob_{name}": 8}, NOT_TAKEN)
        for section in ("ref", "rollout")
        for name in (
            *("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu"),
        )
    ),
    ({f"{ACTOR}.clip_ratio_c": 4.0}, {"actor.clip_ratio_c": 4.0}),
    ({LOSS: "vanilla"}, {"actor.policy_loss": "ppo_clip"}),
    ({LOSS: "cispo"}, {"actor.policy_loss": "cispo"}),
    ({f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum"}, {"actor.loss_agg_mode": "seq-mean-token-sum"}),
    # verl hard-codes the mean over sequences in these three, whatever loss_agg_mode says.
    *(
        (
            {LOSS: loss, f"{ACTOR}.loss_agg_mode": "token-mean", f"{ACTOR}.clip_ratio": clip},
            {"actor.policy_loss": loss, "actor.loss_agg_mode": None, "actor.clip_ratio": clip},
        )
        for loss, clip in (("sapo", 0.2), ("geo_mean", 0.4), ("gspo", 3e-4))
    ),
    ({f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.1}, {"actor.optim.warmup_steps_ratio": 0.1}),
    ({f"{ACTOR}.optim.warmup_style": "cosine"}, {"actor.optim.lr_scheduler": "cosine"}),
    ({f"{ACTOR}.optim.lr_scheduler_type": "constant"}, {"actor.optim.lr_scheduler": "constant"}),
    ({f"{MODEL}.enable_gradient_checkpointing": True}, {"actor.memory.recompute": "full"}),
    ({f"{MODEL}.enable_gradient_checkpointing": False}, {"actor.memory.recompute": "none"}),
    ({f"{ACTOR}.use_torch_compile": True}, {"actor.compile": True}),
    ({f"{ROLLOUT}.top_k": -1}, {"rollout.top_k": 0}),
    ({f"{ROLLOUT}.val_kwargs.n": 4}, {"rollout.val.n": 4}),
    ({f"{ROLLOUT}.val_kwargs.temperature": 0.5}, {"rollout.val.temperature": 0.5}),
    ({"algorithm.filter_groups.enable": True}, {"algorithm.dynamic_sampling.enable": True}),
    ({"critic.model.path": "c"}, {"critic.path": "c"}),
    ({"critic.cliprange_value": 0.4}, {"critic.vf_clip_param": 0.4}),
    ({"critic.optim.lr_warmup_steps_ratio": 0.2}, {"critic.optim.warmup_steps_ratio": 0.2}),
    ({"critic.optim.warmup_style": "cosine"}, {"critic.optim.lr_scheduler": "cosine"}),
    ({"trainer.critic_warmup": 3}, {"critic.warmup": 3}),
    ({"trainer.total_training_steps": 90}, {"trainer.total_steps": 90}),
    ({"trainer.total_epochs": 15}, NOT_TAKEN),
    ({"trainer.n_gpus_per_node": 8}, NOT_TAKEN),
    ({"trainer.nnodes": 2}, NOT_TAKEN),
    ({"trainer.experiment_name": "x"}, {"trainer.name": "x"}),
    ({"trainer.project_name": "x"}, NOT_TAKEN),
    ({"trainer.logger": ["console", "wandb"]}, {"trainer.loggers": ["wandb"]}),
    ({"trainer.default_local_dir": "runs/x"}, {"trainer.run_dir": "runs/x"}),
    ({"trainer.resume_mode": "disable"}, {"trainer.resume": "never"}),
    ({"trainer.resume_mode": "resume_path"}, {"trainer.resume": "auto"}),
    ({"trainer.resume_mode": "auto"}, {"trainer.resume": "auto"}),
    ({"trainer.save_freq": -1}, {"trainer.save_freq": 0}),
    ({"trainer.test_freq": -1}, {"trainer.test_freq": 0}),
    ({"trainer.test_freq": 7}, {"trainer.test_freq": 7}),
    ({"trainer.max_actor_ckpt_to_keep": 2}, {"trainer.keep_checkpoints": 2}),
]
FROM_TRL: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"model_name_or_path": "m"}, {"model.path": "m"}),
    ({"num_generations": 4}, {"rollout.n": 4}),
    (
        {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "num_generations": 4},
        {"actor.ppo_mini_batch_size": 16, "rollout.n": 4},
    ),
    ({"steps_per_generation": 4}, NOT_TAKEN),
    ({"generation_batch_size": 64}, NOT_TAKEN),
    ({"num_iterations": 2}, {"actor.ppo_epochs": 2}),
    ({"max_prompt_length": 99}, {"data.max_prompt_length": 99}),
    ({"max_completion_length": 98}, {"data.max_response_length": 98}),
    ({"learning_rate": "1e-5"}, {"actor.optim.lr": 1e-5}),
    ({"lr_scheduler_type": "cosine"}, {"actor.optim.lr_scheduler": "cosine"}),
    ({"warmup_ratio": 0.1}, {"actor.optim.warmup_steps_ratio": 0.1}),
    ({"weight_decay": 0.1}, {"actor.optim.weight_decay": 0.1}),
    ({"max_grad_norm": 0.2}, {"actor.grad_clip": 0.2}),
    ({"beta": 0.04}, {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.04}),
    ({"beta": 0.0}, {"actor.use_kl_loss": False}),
    # TRL's epsilon is both sides unless epsilon_high says otherwise.
    ({"epsilon": 0.1}, {"actor.clip_ratio": 0.1}),
    ({"epsilon_high": 0.28}, {"actor.clip_ratio_high": 0.28}),
    ({"scale_rewards": "none"}, {"algorithm.norm_adv_by_std_in_grpo": False}),
    ({"scale_rewards": False}, {"algorithm.norm_adv_by_std_in_grpo": False}),
    ({"scale_rewards": "group"}, {"algorithm.norm_adv_by_std_in_grpo": True}),
    ({"scale_rewards": True}, {"algorithm.norm_adv_by_std_in_grpo": True}),
    ({"scale_rewards": "batch"}, NOT_TAKEN),
    ({"loss_type": "grpo"}, {"actor.loss_agg_mode": "seq-mean-token-mean"}),
    ({"loss_type": "bnpo"}, {"actor.loss_agg_mode": "token-mean"}),
    ({"loss_type": "dapo"}, {"actor.loss_agg_mode": "token-mean"}),
    ({"loss_type": "dr_grpo"}, {"actor.loss_agg_mode": "seq-mean-token-sum-norm"}),
    ({"loss_type": "sapo"}, {"actor.policy_loss": "sapo"}),
    ({"loss_type": "cispo"}, NOT_TAKEN),
    ({"vllm_gpu_memory_utilization": 0.3}, {"rollout.gpu_memory_utilization": 0.3}),
    ({"vllm_tensor_parallel_size": 2}, {"rollout.tensor_model_parallel_size": 2}),
    ({"temperature": 0.9}, {"rollout.temperature": 0.9}),
    ({"top_p": 1.0}, {"rollout.top_p": 1.0}),
    ({"top_k": None}, {"rollout.top_k": 0}),
    ({"reward_funcs": "a.py:f"}, {"reward.functions": [{"name": "a.py:f", "weight": 1.0}]}),
    (
        {"reward_funcs": ["a.py:f", "a.py:g"], "reward_weights": [1.0, 0.5]},
        {"reward.functions": [{"name": "a.py:f", "weight": 1.0}, {"name": "a.py:g", "weight": 0.5}]},
    ),
    ({"max_steps": 70}, {"trainer.total_steps": 70}),
    ({"save_steps": 20}, {"trainer.save_freq": 20}),
    ({"eval_steps": 25}, {"trainer.test_freq": 25}),
    ({"output_dir": "runs/x"}, {"trainer.run_dir": "runs/x"}),
    ({"run_name": "x"}, {"trainer.name": "x"}),
    ({"report_to": ["wandb", "all"]}, {"trainer.loggers": ["wandb"]}),
    ({"report_to": "none"}, {"trainer.loggers": []}),
    ({"seed": 3}, {"trainer.seed": 3}),
]
CASES = [("verl", *row) for row in FROM_VERL] + [("trl", *row) for row in FROM_TRL]


@pytest.mark.parametrize(
    ("program", "theirs", "ours"), CASES, ids=lambda v: "+".join(map(str, v)) if isinstance(v, dict) else ""
)
def test_each_key_becomes_the_one_of_ours_that_means_the_same(
    program: str, theirs: dict[str, Any], ours: dict[str, Any] | None
) -> None:
    converted = convert(theirs, program)
    assert _flat(converted.tree) == (ours or {})
    left_out = {f"{key}: {value}" for key, value in theirs.items()} if ours is None else set()
    assert set(converted.left_out) == left_out
    needed: dict[str, Any] = {
        "data": {"train_files": "t.jsonl"},
        "model": {"path": "m"},
        "reward": {"functions": [{"name": "exact_match"}]},
        "trainer": {"total_steps": 9},
    }
    for section, values in converted.tree.items():
        needed[section] = needed.get(section, {}) | values
    parse(RunConfig, needed)


@pytest.mark.parametrize(
    "written", ["", "loss_agg_mode: token-mean\n    ", "loss_agg_mode: seq-mean-token-sum\n    "]
)
@pytest.mark.parametrize("loss", ["sapo", "geo_mean", "gspo"])
def test_losses_of_which_verl_takes_the_mean_over_sequences(tmp_path: Path, loss: str, written: str) -> None:
    clip = {"sapo": 0.2, "geo_mean": 0.4, "gspo": 3e-4}[loss]
    text = VERL_FILE.replace(
        "clip_ratio_high: 0.28\n    policy_loss: {loss_mode: vanilla}",
        f"{written}clip_ratio: {clip}\n    policy_loss: {{loss_mode: {loss}}}",
    )
    command(tmp_path, text)
    assert load(RunConfig, tmp_path / "ours.yaml").actor.aggregation == "seq-mean-token-mean"


def test_each_rule_has_its_row() -> None:
    for program, rows, rules in (("verl", verl.VERL, verl), ("trl", trl.TRL, trl)):
        named = {key for name, theirs, _ in CASES if name == program for key in theirs}
        ruled = {key for row in rows for key in row.keys} | set(rules.MORE)
        assert ruled <= named, sorted(ruled - named)
        others = named - ruled
        for prefix in rules.PREFIXES:
            assert any(key.startswith(prefix) for key in others), prefix


def test_a_section_is_no_key() -> None:
    assert _is_key("actor.optim.lr")
    assert not _is_key("actor.optim")


def test_what_is_no_such_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, words in (
        ("a: [", "is not YAML"),
        ("a: 1\na: 2", "x.yaml: the key a stands in line 1 and in line 2"),
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
