"""Converts verl's keys of rewards, data, adapters and offloading to ours."""

from __future__ import annotations

from typing import Any

from paceline.cli.convert.rules import Changed, Tree, number, trackers

FUNCTION = "custom_reward_function"
MODEL = "actor_rollout_ref.model"
_GSM8K = ["openai/gsm8k"]
_MATH = ["lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"]


def files(value: Any, tree: Tree) -> Tree:
    """Returns the training files, whose rows hold the answer in a nested column."""
    return {"data.train_files": value, "data.ground_truth_key": "reward_model.ground_truth"}


def overlong(value: Any, tree: Tree) -> Tree | Changed:
    """Returns how prompts that are too long are handled."""
    if tree["data.filter_overlong_prompts"]:
        return {"data.overlong_prompts": "filter"}
    ours = {"data.overlong_prompts": "error"}
    if tree["data.truncation"] == "error":
        return ours
    return Changed(
        ours, f"verl cuts longer prompts ({tree['data.truncation']}); Paceline refuses to start with them"
    )


def reward(value: Any, tree: Tree) -> Tree | Changed:
    """Returns the user's function, called as verl calls it; else verl's own functions, or a reward model."""
    path, prefix = next(
        ((tree[f"{at}{FUNCTION}.path"], at) for at in ("", "reward.") if tree.get(f"{at}{FUNCTION}.path")),
        (None, ""),
    )
    if path:
        name = tree.get(f"{prefix}{FUNCTION}.name") or "compute_score"
        start = f"{prefix}{FUNCTION}.reward_kwargs."
        kwargs = {key.removeprefix(start): one for key, one in tree.items() if key.startswith(start)}
        function = {"name": f"{path}:{name}"} | ({"kwargs": kwargs} if kwargs else {})
        return {"reward.functions": [function], "data.extra_keys": ["extra_info"]}
    if tree.get("reward_model.enable") or tree.get("reward.reward_model.enable"):
        return {}
    return Changed(
        {
            "reward.functions": [
                {"name": "gsm8k", "data_sources": _GSM8K},
                {"name": "math_verify", "data_sources": _MATH},
            ]
        },
        "verl's own scores by data source: numbers are compared by value, mathematics by math_verify; rows "
        "of other sources get 0, where verl stops",
    )


def reward_model(value: Any, tree: Tree) -> Tree:
    """Returns a reward model with one score."""
    if not value:
        return {}
    path = tree.get("reward.reward_model.model_path") or tree.get("reward_model.model.path")
    if path is None:
        raise ValueError("name the model: reward.models: [{name: reward_model, path: FOLDER}]")
    return {"reward.models": [{"name": "reward_model", "path": path}]}


def penalty(value: Any, tree: Tree) -> Tree:
    """Returns DAPO's penalty on long responses."""
    for at in (
        "reward.reward_kwargs.overlong_buffer_cfg",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward_model.overlong_buffer",
    ):
        if tree.get(f"{at}.enable"):
            return {
                "algorithm.overlong.enable": True,
                "algorithm.overlong.buffer_length": int(tree[f"{at}.len"]),
                "algorithm.overlong.factor": number(tree.get(f"{at}.penalty_factor", 1.0)),
            }
    return {}


def lora(value: Any, tree: Tree) -> Tree:
    """Returns the adapters, read from verl's keys for FSDP or for Megatron; a rank of 0 means none."""
    at = MODEL if int(tree.get(f"{MODEL}.lora_rank") or 0) else f"{MODEL}.lora"
    rank = int(tree.get(f"{at}_rank" if at == f"{MODEL}.lora" else f"{at}.lora_rank") or 0)
    if at == MODEL:
        alpha, targets = tree[f"{MODEL}.lora_alpha"], tree[f"{MODEL}.target_modules"]
    else:
        rank = int(tree.get(f"{at}.rank") or 0)
        alpha, targets = tree[f"{at}.alpha"], tree.get(f"{at}.target_modules", "all-linear")
    if not rank:
        return {}
    return {
        "model.lora.rank": rank,
        "model.lora.alpha": number(alpha),
        "model.lora.targets": _targets(targets),
    }


def vision(value: Any, tree: Tree) -> Tree:
    """Returns what trains of a vision tower if prompts have images: all, unless verl freezes it."""
    if tree.get("data.image_key") in (None, "images") or lora(None, tree):
        return {}
    return {"model.vision.train": "none" if value else "all"}


_MEGATRON = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
}


def _targets(targets: Any) -> list[str]:
    if targets in ("all-linear", ["all-linear"]):
        return ["all"]
    names = [targets] if isinstance(targets, str) else list(targets)
    return [name for one in names for name in _MEGATRON.get(one, [one])]


def offload_reference(value: Any, tree: Tree) -> Tree:
    """Keeps the reference in host memory, if it has weights of its own."""
    has_kl = tree["actor_rollout_ref.actor.use_kl_loss"] or tree["algorithm.use_kl_in_reward"]
    return {"actor.memory.offload_reference": True} if value and has_kl and not lora(None, tree) else {}


def precision(value: Any, tree: Tree) -> Tree:
    """Returns the type of the forward pass."""
    names = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
    if value not in names:
        raise ValueError(f"{value} is not supported here; model.dtype is bfloat16 or float32")
    return {"model.dtype": names[value]}


def masters(value: Any, tree: Tree) -> Tree | Changed:
    """Returns the type of the weights that the optimizer changes."""
    if value in ("fp32", "float32"):
        return {}
    return Changed({}, "the weights that the optimizer changes are float32 here")


def loggers(value: Any, tree: Tree) -> Tree:
    """Returns the trackers that Paceline has, too; it always logs to the terminal."""
    return trackers(value, silent=("console", "file"))


def resume(value: Any, tree: Tree) -> Tree:
    """Returns whether a run in the same folder is continued."""
    if value == "resume_path":
        raise ValueError("a run goes on from its own folder: set trainer.run_dir to that of the run")
    return {"trainer.resume": {"disable": "never"}.get(value, value)}


_ESTIMATORS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo", "grpo_passk": "pass_at_k"}
_HERE = (
    *("gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    *("remax", "opo", "gpg", "pass_at_k"),
)


def estimator(value: Any, tree: Tree) -> Tree:
    """Returns the estimator by its name here."""
    ours = _ESTIMATORS.get(value, value)
    if ours not in _HERE:
        raise ValueError(f"there is no estimator {value}; see algorithm.adv_estimator, or write one")
    return {"algorithm.adv_estimator": ours}


def extra_prompts(value: Any, tree: Tree) -> Tree | Changed:
    """Returns how many prompts dynamic sampling may draw beyond the batch."""
    if not tree.get("algorithm.filter_groups.enable"):
        return {}
    metric = tree.get("algorithm.filter_groups.metric")
    ours: dict[str, Any] = {"algorithm.dynamic_sampling.enable": True}
    batches = int(tree.get("algorithm.filter_groups.max_num_gen_batches") or 0)
    generated = int(tree.get("data.gen_batch_size") or tree["data.train_batch_size"])
    if batches > 0:
        extra = batches * generated / int(tree["data.train_batch_size"]) - 1
        ours["algorithm.dynamic_sampling.max_extra_factor"] = max(extra, 1.0)
    reasons = [
        "verl stops if the drawn prompts do not suffice; Paceline continues the step with fewer groups"
    ]
    if metric not in (None, "seq_final_reward", "seq_reward", "acc", "score"):
        ours["algorithm.dynamic_sampling.metric"] = metric
    elif metric == "acc":
        reasons.append("groups are compared by their reward; for acc, set dynamic_sampling.metric")
    return Changed(ours, "; ".join(reasons))
