"""The fields of TRL's GRPOConfig, and those of its scripts that name model and data, and ours."""

from __future__ import annotations

from typing import Any

from paceline.cli.convert.rules import ConversionRule, Tree, renamed, to

PREFIXES: dict[str, str] = {}

_AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}


def _mini_batch(value: Any, tree: Tree) -> Tree:
    """Prompts per optimizer step and device: TRL counts samples."""
    samples = int(value) * int(tree.get("gradient_accumulation_steps", 1))
    prompts = samples // int(tree.get("num_generations", 8))
    return {"actor.ppo_mini_batch_size": max(1, prompts)}


def _kl(value: Any, tree: Tree) -> Tree:
    return {"actor.use_kl_loss": True, "actor.kl_loss_coef": value} if value else {"actor.use_kl_loss": False}


def _rewards(value: Any, tree: Tree) -> Tree:
    names = [value] if isinstance(value, str) else list(value or [])
    weights = tree.get("reward_weights") or [1.0] * len(names)
    listed = [{"name": str(n), "weight": w} for n, w in zip(names, weights, strict=False)]
    return {"reward.functions": listed}


def _loss(value: Any, tree: Tree) -> Tree:
    if value == "sapo":
        return {"actor.policy_loss": "sapo"}
    if value not in _AGGREGATIONS:
        raise ValueError("no such aggregation here; see actor.policy_loss and actor.loss_agg_mode")
    return {"actor.loss_agg_mode": _AGGREGATIONS[value]}


def _spread(value: Any, tree: Tree) -> Tree:
    if value == "batch":
        raise ValueError("here advantages are divided by their group's deviation, never by the batch's")
    return {"algorithm.norm_adv_by_std_in_grpo": value not in (False, "none")}


def _loggers(value: Any, tree: Tree) -> Tree:
    names = [value] if isinstance(value, str) else list(value or [])
    return {"trainer.loggers": [name for name in names if name not in ("none", "all")]}


TRL: tuple[ConversionRule, ...] = (
    renamed("model_name_or_path", "model.path"),
    renamed("num_generations", "rollout.n"),
    ConversionRule(
        theirs="`per_device_train_batch_size` × `gradient_accumulation_steps` × devices / `num_generations`",
        ours="`actor.ppo_mini_batch_size`, in prompts",
        keys=("per_device_train_batch_size",),
        convert=_mini_batch,
    ),
    ConversionRule(
        theirs="`steps_per_generation`, `generation_batch_size`",
        ours="`data.train_batch_size`: several mini-batches of one policy's samples",
        keys=("steps_per_generation", "generation_batch_size"),
    ),
    renamed("num_iterations", "actor.ppo_epochs"),
    renamed("max_prompt_length", "data.max_prompt_length"),
    renamed("max_completion_length", "data.max_response_length"),
    renamed(
        "learning_rate",
        "actor.optim.lr",
        by=float,
        theirs="`learning_rate`, `lr_scheduler_type`, `warmup_ratio`",
        says="`actor.optim.lr`, `actor.optim.lr_scheduler`, `actor.optim.warmup_steps_ratio`",
    ),
    renamed("max_grad_norm", "actor.grad_clip"),
    ConversionRule(
        theirs="`beta`",
        ours="`actor.kl_loss_coef`, with `actor.use_kl_loss: true`",
        keys=("beta",),
        convert=_kl,
    ),
    renamed(
        "epsilon",
        "actor.clip_ratio",
        theirs="`epsilon`, `epsilon_high`",
        says="`actor.clip_ratio`, `actor.clip_ratio_high`",
    ),
    ConversionRule(
        theirs="`scale_rewards: none`",
        ours="`algorithm.norm_adv_by_std_in_grpo: false`",
        keys=("scale_rewards",),
        convert=_spread,
    ),
    ConversionRule(
        theirs="`loss_type: grpo`, `dapo`, `dr_grpo`, `sapo`",
        ours="`actor.loss_agg_mode: seq-mean-token-mean`, `token-mean`, `seq-mean-token-sum-norm`; "
        "`actor.policy_loss: sapo`",
        keys=("loss_type",),
        convert=_loss,
    ),
    renamed("vllm_gpu_memory_utilization", "rollout.gpu_memory_utilization"),
    renamed("vllm_tensor_parallel_size", "rollout.tensor_model_parallel_size"),
    renamed(
        "temperature",
        "rollout.temperature",
        theirs="`temperature`, `top_p`, `top_k`",
        says="`rollout.temperature`, `rollout.top_p`, `rollout.top_k`",
    ),
    ConversionRule(
        theirs="`reward_funcs`, `reward_weights`",
        ours="`reward.functions: [{name: ..., weight: ...}]`",
        keys=("reward_funcs",),
        convert=_rewards,
    ),
    renamed("max_steps", "trainer.total_steps"),
    renamed(
        "save_steps",
        "trainer.save_freq",
        theirs="`save_steps`, `eval_steps`",
        says="`trainer.save_freq`, `trainer.test_freq`",
    ),
    renamed(
        "output_dir",
        "trainer.run_dir",
        theirs="`output_dir`, `run_name`",
        says="`trainer.run_dir`, `trainer.name`",
    ),
    ConversionRule(
        theirs="`report_to`",
        ours="`trainer.loggers`",
        keys=("report_to",),
        convert=_loggers,
    ),
)

MORE = {
    "lr_scheduler_type": to("actor.optim.lr_scheduler"),
    "warmup_ratio": to("actor.optim.warmup_steps_ratio"),
    "weight_decay": to("actor.optim.weight_decay"),
    "epsilon_high": to("actor.clip_ratio_high"),
    "top_p": to("rollout.top_p"),
    "top_k": to("rollout.top_k", by=lambda value: max(0, int(value or 0))),
    "eval_steps": to("trainer.test_freq"),
    "run_name": to("trainer.name"),
    "seed": to("trainer.seed"),
    "gradient_accumulation_steps": lambda value, tree: {},
    "reward_weights": lambda value, tree: {},
}
