"""The table for TRL's GRPO scripts: arguments of GRPOConfig, and those that name model and data."""

from __future__ import annotations

from typing import Any

from paceline.cli.convert.rules import Changed, ConversionRule, Tree, number, part, renamed, rule
from paceline.cli.convert.trl import data
from paceline.cli.convert.trl.batches import batch_sizes, every, every_epoch, length, warmup_share
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
    first = {"trainer.val_before_train": bool(tree["eval_on_start"])} | data.evaluation(value, tree)
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
    rule("model_name_or_path", "`model.path`", data.model),
    part("model_revision", "model_name_or_path", default="main"),
    rule("dataset_name", "`data.train_files`, a name on the hub or files", data.train_data),
    part("dataset_train_split", "dataset_name", default="train"),
    part("dataset_config", "dataset_name"),
    rule("dataset_test_split", "`data.val_files`, with `eval_strategy`", data.held_out_data, default="test"),
    rule("eval_dataset", "`data.val_files`", lambda value, tree: {"data.val_files": value}),
    rule(data.REWARDS, "`reward.functions` and, for names on the hub, `reward.models`", data.rewards),
    part(f"reward_weights {data.MESSAGES}", data.REWARDS),
    renamed(data.ANSWER, "data.ground_truth_key"),
    renamed(data.COLUMNS, "data.extra_keys"),
    rule(
        "per_device_train_batch_size",
        "`data.train_batch_size`, `actor.ppo_mini_batch_size`, `actor.ppo_epochs`, by the sums below",
        batch_sizes,
        default=8,
    ),
    part("gradient_accumulation_steps", "per_device_train_batch_size", default=1),
    part("steps_per_generation generation_batch_size", "per_device_train_batch_size"),
    part("num_iterations", "per_device_train_batch_size", default=1),
    renamed("num_generations", "rollout.n", default=8),
    rule(
        "max_steps",
        "`trainer.total_steps`, divided by the updates per step; if it is not set, `trainer.total_epochs` "
        "for `num_train_epochs`",
        length,
        default=-1,
    ),
    part("num_train_epochs", "max_steps", default=3.0),
    renamed("max_completion_length", "data.max_response_length", default=512),
    rule(
        "max_prompt_length",
        "`data.max_prompt_length`, with `data.overlong_prompts: error`",
        _prompt_length,
        default=None,
    ),
    renamed("learning_rate", "actor.optim.lr", default=1e-6, by=number),
    rule(
        "lr_scheduler_type",
        "`actor.optim.lr_scheduler`, `.lr_cycles`, `.min_lr_ratio`",
        schedule,
        default="linear",
    ),
    part("lr_scheduler_kwargs lr_scheduler_kwargs.*", "lr_scheduler_type"),
    rule("warmup_steps warmup_ratio", "`actor.optim.warmup_steps_ratio`", warmup_share, default=0),
    rule("weight_decay", "`actor.optim.weight_decay`", _decay, default=0.0),
    rule(
        "adam_beta1 adam_beta2",
        "`actor.optim.betas`",
        lambda value, tree: {"actor.optim.betas": [number(tree["adam_beta1"]), number(tree["adam_beta2"])]},
        default={"adam_beta1": 0.9, "adam_beta2": 0.999},
    ),
    renamed("adam_epsilon", "actor.optim.eps", default=1e-8, by=number),
    rule(
        "max_grad_norm",
        "`actor.grad_clip`; 0 is none",
        lambda value, tree: {"actor.grad_clip": number(value) or 1e9},
        default=1.0,
    ),
    rule("beta", "`actor.kl_loss_coef`, with `actor.use_kl_loss: true`", _beta, default=0.0),
    rule(
        "loss_type",
        "`actor.loss_agg_mode`, `actor.policy_loss`, `actor.clip_ratio`, `actor.use_dual_clip`",
        loss,
        default="dapo",
    ),
    part("epsilon", "loss_type", default=0.2),
    part("epsilon_high delta", "loss_type"),
    part("sapo_temperature_pos", "loss_type", default=1.0),
    part("sapo_temperature_neg", "loss_type", default=1.05),
    part("importance_sampling_level", "loss_type", default="token"),
    rule("scale_rewards", "`algorithm.norm_adv_by_std_in_grpo`", deviation, default="group"),
    renamed("entropy_coef", "actor.entropy_coeff", default=0.0, by=number),
    rule(
        "vllm_importance_sampling_correction",
        "`algorithm.rollout_correction`, with `use_vllm`",
        correction,
        default=True,
    ),
    part("use_vllm", "vllm_importance_sampling_correction", default=False),
    part("vllm_importance_sampling_mode", "vllm_importance_sampling_correction", default="sequence_mask"),
    part("vllm_importance_sampling_clip_max", "vllm_importance_sampling_correction", default=3.0),
    part("vllm_importance_sampling_clip_min", "vllm_importance_sampling_correction"),
    renamed("temperature", "rollout.temperature", default=1.0, by=number),
    rule("router_aux_loss_coef", "`actor.load_balance_coef`, for a mixture of experts", _experts),
    renamed("shuffle_dataset", "data.shuffle", default=True),
    renamed("seed", "trainer.seed", default=42),
    renamed("data_seed", "data.seed"),
    rule("bf16", "`model.dtype`", data.precision, default=None),
    rule("dtype", "nothing: masters of the weights are float32", data.stored),
    rule("use_peft", "`model.lora`; without `lora_target_modules`, PEFT's choice for most models", lora),
    part("lora_r", "use_peft", default=16),
    part("lora_alpha", "use_peft", default=32),
    part("lora_dropout", "use_peft", default=0.05),
    part("lora_target_modules use_rslora lora_task_type", "use_peft"),
    rule(
        "eval_strategy",
        "`trainer.test_freq`, `trainer.val_before_train`, `rollout.val`",
        _validations,
        default="no",
    ),
    part("eval_steps num_generations_eval", "eval_strategy"),
    part("logging_steps", "eval_strategy", default=10),
    part("eval_on_start", "eval_strategy", default=False),
    rule("save_strategy", "`trainer.save_freq`, divided by the updates per step", _saves, default="steps"),
    part("save_steps", "save_strategy", default=500),
    renamed("save_total_limit", "trainer.keep_checkpoints"),
    renamed("output_dir", "trainer.run_dir"),
    renamed("run_name", "trainer.name"),
    rule("report_to", "`trainer.loggers`", data.loggers),
    rule("resume_from_checkpoint", "`trainer.resume`", _resume),
    *REST,
)
