"""The table for TRL's GRPO scripts: arguments of GRPOConfig, and those that name model and data."""

from __future__ import annotations

from typing import Any

from paceline.cli.convert.rules import Changed, ConversionRule, Tree, number, part, renamed, rule
from paceline.cli.convert.trl.batches import batch_sizes, every, every_epoch, length, warmup_share
from paceline.cli.convert.trl.data import (
    ANSWER,
    COLUMNS,
    MESSAGES,
    REWARDS,
    evaluation,
    held_out_data,
    loggers,
    model,
    precision,
    rewards,
    stored,
    train_data,
)
from paceline.cli.convert.trl.losses import correction, deviation, lora, loss, schedule
from paceline.cli.convert.trl.rest import REST


def _prompt_length(value: Any, tree: Tree) -> Tree | Changed:
    length = {} if value is None else {"data.max_prompt_length": int(value)}
    return Changed(
        length | {"data.overlong_prompts": "error"},
        "prompts longer than data.max_prompt_length are refused; TRL cuts them, or has no bound",
    )


def _validations(value: Any, tree: Tree) -> Tree | Changed:
    if value == "no":
        return {"trainer.test_freq": 0, "trainer.val_before_train": False}
    first = {"trainer.val_before_train": bool(tree["eval_on_start"])} | evaluation(value, tree)
    if value == "epoch":
        frequency = every_epoch("trainer.test_freq", tree)
    else:
        frequency = every("trainer.test_freq", tree.get("eval_steps") or tree["logging_steps"], tree)
    if isinstance(frequency, Changed):
        return Changed(dict(frequency.values) | first, frequency.reason)
    return dict(frequency) | first


def _saves(value: Any, tree: Tree) -> Tree | Changed:
    if value == "no":
        return {"trainer.save_freq": 0}
    if value == "epoch":
        return every_epoch("trainer.save_freq", tree)
    if value == "best":
        raise ValueError("checkpoints are kept by their step, not by a metric; see trainer.save_freq")
    return every("trainer.save_freq", number(tree["save_steps"]), tree)


def _beta(value: Any, tree: Tree) -> Tree:
    beta = number(value)
    return {"actor.use_kl_loss": True, "actor.kl_loss_coef": beta} if beta else {"actor.use_kl_loss": False}


def _bound(value: Any, tree: Tree) -> Tree:
    return {"actor.grad_clip": number(value) or 1e9}


def _experts(value: Any, tree: Tree) -> Tree | Changed:
    if not value:
        return {}
    return Changed({}, "has an effect only in a mixture of experts: for one, write actor.load_balance_coef")


def _decay(value: Any, tree: Tree) -> Tree | Changed:
    decay = {"actor.optim.weight_decay": number(value)}
    return Changed(decay, "norms and biases decay here, too") if number(value) else decay


def _resume(value: Any, tree: Tree) -> Tree:
    if value is True:
        return {"trainer.resume": "auto"}
    raise ValueError("a run goes on from its own folder, trainer.run_dir; start from a model by model.path")


RULES: tuple[ConversionRule, ...] = (
    rule(
        "model_name_or_path",
        "`model.path`",
        model,
        ({"model_name_or_path": "m"}, {"model.path": "m"}),
        ({"model_name_or_path": "o/m", "model_revision": "v1"}, {"model.path": "o/m@v1"}),
    ),
    part("model_revision", "model_name_or_path", default="main"),
    rule(
        "dataset_name",
        "`data.train_files`, a name on the hub or files",
        train_data,
        ({"dataset_name": "o/d"}, {"data.train_files": "o/d::train"}),
        ({"dataset_name": "o/d", "dataset_config": "c"}, {"data.train_files": "o/d:c:train"}),
        ({"dataset_name": "t.parquet"}, {"data.train_files": "t.parquet"}),
    ),
    part("dataset_train_split", "dataset_name", default="train"),
    part("dataset_config", "dataset_name"),
    rule(
        "dataset_test_split",
        "`data.val_files`, with `eval_strategy`",
        held_out_data,
        ({"dataset_test_split": "val"}, {}),
        default="test",
    ),
    rule(
        "eval_dataset",
        "`data.val_files`",
        lambda value, tree: {"data.val_files": value},
        ({"eval_dataset": "v.jsonl"}, {"data.val_files": "v.jsonl"}),
    ),
    rule(
        REWARDS,
        "`reward.functions` and, for names on the hub, `reward.models`",
        rewards,
        ({REWARDS: "a.py:f"}, {"reward.functions": [{"name": "a.py:f", "group": True}]}),
        ({REWARDS: ["my.mod.f"]}, {"reward.functions": [{"name": "my.mod:f", "group": True}]}),
        (
            {REWARDS: ["a.py:f", "o/rm"], "reward_weights": [1.0, 0.5]},
            {
                "reward.functions": [{"name": "a.py:f", "group": True}],
                "reward.models": [{"name": "rm", "path": "o/rm", "weight": 0.5}],
            },
        ),
        (
            {REWARDS: "accuracy_reward"},
            {"reward.functions": [{"name": "math_verify"}], "data.ground_truth_key": "solution"},
        ),
        (
            {REWARDS: "think_format_reward"},
            {"reward.functions": [{"name": "trl.rewards:think_format_reward", "group": True}]},
        ),
        ({REWARDS: "get_soft_overlong_punishment"}, None),
    ),
    part(f"reward_weights {MESSAGES}", REWARDS),
    renamed(ANSWER, "data.ground_truth_key", "solution"),
    renamed(COLUMNS, "data.extra_keys", ["level"]),
    rule(
        "per_device_train_batch_size",
        "`data.train_batch_size`, `actor.ppo_mini_batch_size`, `actor.ppo_epochs`, by the sums below",
        batch_sizes,
        (
            {"per_device_train_batch_size": 16, "num_generations": 4, "gradient_accumulation_steps": 4},
            {"data.train_batch_size": 16, "actor.ppo_mini_batch_size": 16, "actor.ppo_epochs": 1},
        ),
        (
            {"per_device_train_batch_size": 8, "steps_per_generation": 4, "num_iterations": 2},
            {"data.train_batch_size": 4, "actor.ppo_mini_batch_size": 1, "actor.ppo_epochs": 2},
        ),
        (
            {"per_device_train_batch_size": 8, "generation_batch_size": 64},
            {"data.train_batch_size": 8, "actor.ppo_mini_batch_size": 1, "actor.ppo_epochs": 1},
        ),
        ({"per_device_train_batch_size": 4}, None),
        default=8,
    ),
    part("gradient_accumulation_steps", "per_device_train_batch_size", default=1),
    part("steps_per_generation generation_batch_size", "per_device_train_batch_size"),
    part("num_iterations", "per_device_train_batch_size", default=1),
    renamed("num_generations", "rollout.n", 4, default=8),
    rule(
        "max_steps",
        "`trainer.total_steps`, divided by the updates per step; if it is not set, `trainer.total_epochs` "
        "for `num_train_epochs`",
        length,
        ({"num_train_epochs": 2.5}, {"trainer.total_epochs": 2.5}),
        ({"max_steps": 70}, {"trainer.total_steps": 70}),
        ({"max_steps": 70, "num_iterations": 2}, {"trainer.total_steps": 35}),
        default=-1,
    ),
    part("num_train_epochs", "max_steps", default=3.0),
    renamed("max_completion_length", "data.max_response_length", 98, default=512),
    rule(
        "max_prompt_length",
        "`data.max_prompt_length`, with `data.overlong_prompts: error`",
        _prompt_length,
        ({"max_prompt_length": 99}, {"data.max_prompt_length": 99, "data.overlong_prompts": "error"}),
        default=None,
    ),
    renamed("learning_rate", "actor.optim.lr", "1e-5", default=1e-6, by=number, becomes=1e-5),
    rule(
        "lr_scheduler_type",
        "`actor.optim.lr_scheduler`, `.lr_cycles`, `.min_lr_ratio`",
        schedule,
        ({"lr_scheduler_type": "constant_with_warmup"}, {"actor.optim.lr_scheduler": "constant"}),
        ({"lr_scheduler_type": "cosine"}, {"actor.optim.lr_scheduler": "cosine"}),
        (
            {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
            {"actor.optim.lr_scheduler": "cosine_with_restarts", "actor.optim.lr_cycles": 2},
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
            {"actor.optim.lr_scheduler": "cosine", "actor.optim.min_lr_ratio": 0.1},
        ),
        ({"lr_scheduler_type": "polynomial"}, None),
        default="linear",
    ),
    part("lr_scheduler_kwargs lr_scheduler_kwargs.*", "lr_scheduler_type"),
    rule(
        "warmup_steps warmup_ratio",
        "`actor.optim.warmup_steps_ratio`",
        warmup_share,
        ({"warmup_ratio": 0.1}, {"actor.optim.warmup_steps_ratio": 0.1}),
        ({"warmup_steps": 7, "max_steps": 70}, {"actor.optim.warmup_steps_ratio": 0.1}),
        default=0,
    ),
    rule(
        "weight_decay",
        "`actor.optim.weight_decay`",
        _decay,
        ({"weight_decay": 0.1}, {"actor.optim.weight_decay": 0.1}),
        default=0.0,
    ),
    rule(
        "adam_beta1 adam_beta2",
        "`actor.optim.betas`",
        lambda value, tree: {"actor.optim.betas": [number(tree["adam_beta1"]), number(tree["adam_beta2"])]},
        ({"adam_beta1": 0.8}, {"actor.optim.betas": [0.8, 0.999]}),
        ({"adam_beta2": 0.95}, {"actor.optim.betas": [0.9, 0.95]}),
        default={"adam_beta1": 0.9, "adam_beta2": 0.999},
    ),
    renamed("adam_epsilon", "actor.optim.eps", 1e-6, default=1e-8, by=number),
    rule(
        "max_grad_norm",
        "`actor.grad_clip`; 0 is none",
        _bound,
        ({"max_grad_norm": 0.2}, {"actor.grad_clip": 0.2}),
        ({"max_grad_norm": 0}, {"actor.grad_clip": 1e9}),
        default=1.0,
    ),
    rule(
        "beta",
        "`actor.kl_loss_coef`, with `actor.use_kl_loss: true`",
        _beta,
        ({"beta": 0.04}, {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.04}),
        ({"beta": 0.0}, {"actor.use_kl_loss": False}),
        default=0.0,
    ),
    rule(
        "loss_type",
        "`actor.loss_agg_mode`, `actor.policy_loss`, `actor.clip_ratio`, `actor.use_dual_clip`",
        loss,
        (
            {"loss_type": "grpo", "epsilon": 0.1},
            {
                "actor.loss_agg_mode": "seq-mean-token-mean",
                "actor.clip_ratio": 0.1,
                "actor.use_dual_clip": False,
            },
        ),
        (
            {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 4.0},
            {
                "actor.loss_agg_mode": "token-mean",
                "actor.clip_ratio": 0.2,
                "actor.clip_ratio_high": 0.28,
                "actor.use_dual_clip": True,
                "actor.clip_ratio_c": 4.0,
            },
        ),
        (
            {"loss_type": "bnpo"},
            {"actor.loss_agg_mode": "token-mean", "actor.clip_ratio": 0.2, "actor.use_dual_clip": False},
        ),
        (
            {"loss_type": "dr_grpo"},
            {
                "actor.loss_agg_mode": "seq-mean-token-sum-norm",
                "actor.clip_ratio": 0.2,
                "actor.use_dual_clip": False,
            },
        ),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0},
            {
                "actor.loss_agg_mode": "token-mean",
                "actor.policy_loss": {"type": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 4.0},
            },
        ),
        ({"loss_type": "cispo"}, None),
        (
            {"loss_type": "sapo", "sapo_temperature_neg": 1.1},
            {
                "actor.loss_agg_mode": "seq-mean-token-mean",
                "actor.policy_loss": {"type": "sapo", "tau_positive": 1.0, "tau_negative": 1.1},
            },
        ),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4},
            {
                "actor.policy_loss": "gspo",
                "actor.loss_agg_mode": "seq-mean-token-mean",
                "actor.clip_ratio": 3e-4,
            },
        ),
        ({"loss_type": "vespo"}, None),
        default="dapo",
    ),
    part("epsilon", "loss_type", default=0.2),
    part("epsilon_high delta", "loss_type"),
    part("sapo_temperature_pos", "loss_type", default=1.0),
    part("sapo_temperature_neg", "loss_type", default=1.05),
    part("importance_sampling_level", "loss_type", default="token"),
    rule(
        "scale_rewards",
        "`algorithm.norm_adv_by_std_in_grpo`",
        deviation,
        ({"scale_rewards": "none"}, {"algorithm.norm_adv_by_std_in_grpo": False}),
        ({"scale_rewards": False}, {"algorithm.norm_adv_by_std_in_grpo": False}),
        ({"scale_rewards": True}, {"algorithm.norm_adv_by_std_in_grpo": True}),
        ({"scale_rewards": "batch"}, None),
        default="group",
    ),
    renamed("entropy_coef", "actor.entropy_coeff", 0.01, default=0.0, by=number),
    rule(
        "vllm_importance_sampling_correction",
        "`algorithm.rollout_correction`, with `use_vllm`",
        correction,
        ({"use_vllm": False, "vllm_importance_sampling_correction": True}, {}),
        (
            {
                "use_vllm": True,
                "vllm_importance_sampling_correction": True,
                "vllm_importance_sampling_mode": "token_truncate",
                "vllm_importance_sampling_clip_max": 2.0,
            },
            {
                "algorithm.rollout_correction.method": "tis",
                "algorithm.rollout_correction.level": "token",
                "algorithm.rollout_correction.cap": 2.0,
            },
        ),
        (
            {
                "use_vllm": True,
                "vllm_importance_sampling_correction": True,
                "vllm_importance_sampling_mode": "token_mask",
                "vllm_importance_sampling_clip_min": 0.5,
            },
            {
                "algorithm.rollout_correction.method": "icepop",
                "algorithm.rollout_correction.level": "token",
                "algorithm.rollout_correction.low": 0.5,
                "algorithm.rollout_correction.high": 3.0,
            },
        ),
        default=True,
    ),
    part("use_vllm", "vllm_importance_sampling_correction", default=False),
    part("vllm_importance_sampling_mode", "vllm_importance_sampling_correction", default="sequence_mask"),
    part("vllm_importance_sampling_clip_max", "vllm_importance_sampling_correction", default=3.0),
    part("vllm_importance_sampling_clip_min", "vllm_importance_sampling_correction"),
    renamed("temperature", "rollout.temperature", 0.9, default=1.0, by=number),
    rule(
        "router_aux_loss_coef",
        "`actor.load_balance_coef`, for a mixture of experts",
        _experts,
        ({"router_aux_loss_coef": 0.001}, {}),
    ),
    renamed("shuffle_dataset", "data.shuffle", False, default=True),
    renamed("seed", "trainer.seed", 3, default=42),
    renamed("data_seed", "data.seed", 5),
    rule(
        "bf16",
        "`model.dtype`",
        precision,
        ({"bf16": True}, {"model.dtype": "bfloat16"}),
        ({"bf16": False}, {"model.dtype": "float32"}),
        default=None,
    ),
    rule("dtype", "nothing: masters of the weights are float32", stored, ({"dtype": "bfloat16"}, {})),
    rule(
        "use_peft",
        "`model.lora`; without `lora_target_modules`, PEFT's choice for most models",
        lora,
        (
            {"use_peft": True, "lora_r": 8, "lora_dropout": 0.0, "lora_target_modules": "all-linear"},
            {"model.lora.rank": 8, "model.lora.alpha": 32.0, "model.lora.targets": ["all"]},
        ),
        (
            {"use_peft": True, "use_rslora": True},
            {
                "model.lora.rank": 16,
                "model.lora.alpha": 128.0,
                "model.lora.targets": ["q_proj", "v_proj"],
            },
        ),
        ({"use_peft": False}, {}),
    ),
    part("lora_r", "use_peft", default=16),
    part("lora_alpha", "use_peft", default=32),
    part("lora_dropout", "use_peft", default=0.05),
    part("lora_target_modules use_rslora lora_task_type", "use_peft"),
    rule(
        "eval_strategy",
        "`trainer.test_freq`, `trainer.val_before_train`, `rollout.val`",
        _validations,
        (
            {"eval_strategy": "steps", "eval_steps": 25},
            {
                "trainer.test_freq": 25,
                "trainer.val_before_train": False,
                "rollout.val.n": 8,
                "rollout.val.temperature": 1.0,
            },
        ),
        ({"eval_strategy": "no"}, {"trainer.test_freq": 0, "trainer.val_before_train": False}),
        default="no",
    ),
    part("eval_steps num_generations_eval", "eval_strategy"),
    part("logging_steps", "eval_strategy", default=10),
    part("eval_on_start", "eval_strategy", default=False),
    rule(
        "save_strategy",
        "`trainer.save_freq`, divided by the updates per step",
        _saves,
        ({"save_steps": 20, "save_strategy": "steps"}, {"trainer.save_freq": 20}),
        ({"save_strategy": "no"}, {"trainer.save_freq": 0}),
        ({"save_strategy": "best"}, None),
        default="steps",
    ),
    part("save_steps", "save_strategy", default=500),
    renamed("save_total_limit", "trainer.keep_checkpoints", 3),
    renamed("output_dir", "trainer.run_dir", "runs/x"),
    renamed("run_name", "trainer.name", "x"),
    rule(
        "report_to",
        "`trainer.loggers`",
        loggers,
        ({"report_to": ["wandb"]}, {"trainer.loggers": ["wandb"]}),
        ({"report_to": "none"}, {"trainer.loggers": []}),
        ({"report_to": "neptune"}, None),
    ),
    rule(
        "resume_from_checkpoint",
        "`trainer.resume`",
        _resume,
        ({"resume_from_checkpoint": True}, {"trainer.resume": "auto"}),
        ({"resume_from_checkpoint": "out/checkpoint-5"}, None),
    ),
    *REST,
)
