"""Converts TRL's losses, rollout corrections and schedules to ours."""

from __future__ import annotations

import math
from typing import Any

from paceline.cli.convert.rules import Changed, Tree, number
from paceline.cli.convert.trl.batches import Batches

_NO_BOUND = 1e9


def loss(value: Any, tree: Tree) -> Tree | Changed:
    """Returns the policy loss with its clip range and its aggregation."""
    if tree["importance_sampling_level"] == "sequence":
        if value not in ("grpo", None):
            raise ValueError(
                f"loss_type={value} on ratios of sequences is not here; loss_type=grpo with them is "
                "actor.policy_loss: gspo"
            )
        return {"actor.policy_loss": "gspo", "actor.loss_agg_mode": "seq-mean-token-mean"} | _range(tree)
    if value == "cispo":
        return _cispo(tree)
    if value == "sapo":
        gate = {
            "type": "sapo",
            "tau_positive": number(tree["sapo_temperature_pos"]),
            "tau_negative": number(tree["sapo_temperature_neg"]),
        }
        return {"actor.policy_loss": gate, "actor.loss_agg_mode": "seq-mean-token-mean"}
    clipped = _range(tree) | _dual_clip(tree)
    if value == "grpo":
        return {"actor.loss_agg_mode": "seq-mean-token-mean"} | clipped
    if value == "dr_grpo":
        return {"actor.loss_agg_mode": "seq-mean-token-sum-norm"} | clipped
    if value == "dapo":
        return _token_mean(tree, clipped)
    if value == "bnpo":
        return Changed(
            {"actor.loss_agg_mode": "token-mean"} | clipped,
            "TRL takes the mean over the tokens of each micro-batch of a process, then the mean of those; "
            "here it is over all tokens of the update",
        )
    raise ValueError(
        f"there is no loss {value}; see actor.policy_loss and actor.loss_agg_mode, or write one "
        "(docs/add-an-algorithm.md)"
    )


def _token_mean(tree: Tree, values: Tree) -> Tree | Changed:
    """Converts TRL's sum over an update's tokens, divided by the tokens of the whole generation batch."""
    ours = {"actor.loss_agg_mode": "token-mean"} | dict(values)
    batches = Batches.of(tree)
    if batches.prompts == batches.prompts_per_update and batches.generations == 1:
        return ours
    return Changed(
        ours,
        "TRL divides an update's sum by the tokens of its whole generation batch; Paceline divides it by the "
        "update's own tokens: gradients differ by the number of updates per batch, which AdamW evens out, "
        "before the clip of "
        "their norm",
    )


def _range(tree: Tree) -> dict[str, Any]:
    low, high = number(tree["epsilon"]), tree.get("epsilon_high")
    ours: dict[str, Any] = {"actor.clip_ratio": low}
    return ours if high is None else ours | {"actor.clip_ratio_high": number(high)}


def _dual_clip(tree: Tree) -> dict[str, Any]:
    bound = tree.get("delta")
    if bound is None:
        return {"actor.use_dual_clip": False}
    return {"actor.use_dual_clip": True, "actor.clip_ratio_c": number(bound)}


def _cispo(tree: Tree) -> Tree | Changed:
    """Returns cispo's clip: TRL's epsilon_high is the largest weight itself, and there is no lower bound."""
    high = number(tree["epsilon"] if tree.get("epsilon_high") is None else tree["epsilon_high"])
    if high <= 1:
        raise ValueError(
            f"epsilon_high={high:g} is the largest weight of a token in TRL's cispo and would cut weights of "
            "1; set it above 1 (5 in the paper)"
        )
    clip = {"type": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": high - 1}
    return _token_mean(tree, {"actor.policy_loss": clip})


def correction(value: Any, tree: Tree) -> Tree | Changed:
    """Returns the weights for the difference of sampler and learner, which TRL uses only with vLLM."""
    if not value or not tree["use_vllm"]:
        return {}
    mode = tree["vllm_importance_sampling_mode"]
    low, high = tree.get("vllm_importance_sampling_clip_min"), tree.get("vllm_importance_sampling_clip_max")
    level, _, kind = str(mode).partition("_")
    key = "algorithm.rollout_correction"
    if kind == "truncate":
        if low is not None or high is None:
            raise ValueError(f"{mode} with a lower bound or without an upper one is not here; see {key}")
        return {f"{key}.method": "tis", f"{key}.level": level, f"{key}.cap": number(high)}
    bounds = {f"{key}.low": number(low or 0.0), f"{key}.high": _NO_BOUND if high is None else number(high)}
    if mode == "token_mask":
        return {f"{key}.method": "icepop", f"{key}.level": "token", **bounds}
    if mode == "sequence_mask":
        return Changed(
            {f"{key}.method": "sequence_mask", f"{key}.level": "sequence", **bounds},
            "a sequence within the bounds has its ratio as its weight in TRL, and 1 here",
        )
    raise ValueError(f"there is no mode {mode}; see {key}")


_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_with_restarts": "cosine_with_restarts",
}


def schedule(value: Any, tree: Tree) -> Tree | Changed:
    """Returns the shape of the rate with its arguments."""
    if value not in _SCHEDULES:
        raise ValueError(
            f"there is no schedule {value}; actor.optim.lr_scheduler is one of "
            f"{', '.join(sorted(set(_SCHEDULES.values())))}"
        )
    ours: dict[str, Any] = {"actor.optim.lr_scheduler": _SCHEDULES[value]}
    start = "lr_scheduler_kwargs."
    given = {key.removeprefix(start): one for key, one in tree.items() if key.startswith(start)}
    for name, argument in given.items():
        if name == "num_cycles" and value == "cosine_with_restarts":
            ours["actor.optim.lr_cycles"] = int(argument)
        elif name == "min_lr_rate":
            ours["actor.optim.min_lr_ratio"] = number(argument)
        elif name == "min_lr":
            ours["actor.optim.min_lr_ratio"] = number(argument) / number(tree["learning_rate"])
        else:
            raise ValueError(f"lr_scheduler_kwargs has {name}={argument}, which {value} does not have here")
    if ours["actor.optim.lr_scheduler"] == "constant" and not tree.get("warmup_steps"):
        return ours
    try:
        per_step = Batches.of(tree).updates
    except ValueError:
        per_step = 1
    inside = "" if per_step == 1 else f", and all {per_step} updates of a step have the step's rate"
    return Changed(ours, f"step s has the rate that TRL gives the step after it{inside}")


def deviation(value: Any, tree: Tree) -> Tree | Changed:
    """Returns whether advantages are divided by their group's standard deviation."""
    key = "algorithm.norm_adv_by_std_in_grpo"
    if value in (False, "none"):
        return {key: False}
    if value == "batch":
        raise ValueError("here advantages are divided by their group's deviation, never by the batch's")
    return Changed({key: True}, "the deviation has 1e-6 added to it, in TRL 1e-4")


def lora(value: Any, tree: Tree) -> Tree | Changed:
    """Returns the adapters, as PEFT defines them."""
    if not value:
        return {}
    rank, alpha = int(tree["lora_r"]), number(tree["lora_alpha"])
    targets = tree.get("lora_target_modules") or ["q_proj", "v_proj"]
    ours = {
        "model.lora.rank": rank,
        "model.lora.alpha": alpha * math.sqrt(rank) if tree.get("use_rslora") else alpha,
        "model.lora.targets": ["all"] if targets in ("all-linear", ["all-linear"]) else list(targets),
    }
    dropout = number(tree["lora_dropout"])
    if not dropout:
        return ours
    return Changed(ours, f"adapters have no dropout here, lora_dropout={dropout:g} there")
