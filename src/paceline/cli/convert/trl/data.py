"""Converts TRL's rewards, data sets and model names to ours."""

from __future__ import annotations

from typing import Any

from paceline.cli.convert.rules import Changed, Tree, trackers

REWARDS = "reward_funcs"
ANSWER, COLUMNS, MESSAGES = (f"{REWARDS}.{name}" for name in ("answer", "columns", "messages"))
"""What a script's own reward functions use: the column with the answer, further columns, and messages."""
_MATHEMATICS = ("accuracy_reward", "reasoning_accuracy_reward")
_OF_TRL = ("think_format_reward", "get_soft_overlong_punishment", *_MATHEMATICS)


def rewards(value: Any, tree: Tree) -> Tree | Changed:
    """Returns reward functions, which get the samples of a prompt, and models, with their weights."""
    names = [value] if isinstance(value, str) else list(value or [])
    weights = tree.get("reward_weights") or [1.0] * len(names)
    if len(weights) != len(names):
        raise ValueError(f"reward_weights has {len(weights)} numbers for {len(names)} functions")
    functions: list[dict[str, Any]] = []
    models: list[dict[str, Any]] = []
    reasons: list[str] = []
    for name, weight in zip(map(str, names), weights, strict=True):
        weighted: dict[str, Any] = {} if float(weight) == 1 else {"weight": float(weight)}
        if name in _MATHEMATICS:
            functions.append({"name": "math_verify"} | weighted)
            reasons.append(f"{name} is math_verify, by the same library; an answer that it cannot read is 0")
        elif name == "get_soft_overlong_punishment":
            raise ValueError("write algorithm.overlong: {enable: true, buffer_length: ..., factor: 1}")
        elif "/" in name and ":" not in name:
            models.append({"name": name.rpartition("/")[2], "path": name} | weighted)
        else:
            messages = {"kwargs": {"completions": "messages"}} if tree.get(MESSAGES) else {}
            functions.append({"name": _reference(name), "group": True} | weighted | messages)
            reasons.append("a function gets the samples of one prompt at a time, in TRL those of a device")
    ours: dict[str, Any] = {}
    ours |= {"reward.functions": functions} if functions else {}
    ours |= {"reward.models": models} if models else {}
    if any(name in _MATHEMATICS for name in names):
        ours["data.ground_truth_key"] = "solution"
    return Changed(ours, "; ".join(dict.fromkeys(reasons))) if reasons else ours


def _reference(name: str) -> str:
    """Returns a dotted path as `module:function`; TRL's own functions are in its package."""
    if name in _OF_TRL:
        return f"trl.rewards:{name}"
    if ":" in name or "." not in name:
        return name
    module, _, function = name.rpartition(".")
    return f"{module}:{function}"


def train_data(value: Any, tree: Tree) -> Tree:
    """Returns the training split of a data set of the hub, or files."""
    return {"data.train_files": _place(value, tree, str(tree["dataset_train_split"]))}


def held_out_data(value: Any, tree: Tree) -> Tree:
    """Returns the held-out split, if TRL evaluates."""
    if tree["eval_strategy"] == "no" or tree.get("dataset_name") is None:
        return {}
    return {"data.val_files": _place(tree["dataset_name"], tree, str(value))}


def _place(name: Any, tree: Tree, split: str) -> Any:
    if isinstance(name, list) or str(name).endswith((".parquet", ".jsonl")):
        return name
    return f"{name}:{tree.get('dataset_config') or ''}:{split}"


def model(value: Any, tree: Tree) -> Tree:
    """Returns the policy, at its revision."""
    revision = tree["model_revision"]
    return {"model.path": value if revision in (None, "main") else f"{value}@{revision}"}


def precision(value: Any, tree: Tree) -> Tree:
    """Returns the type of the forward pass."""
    if tree.get("fp16"):
        raise ValueError("float16 is not supported here; model.dtype is bfloat16 or float32")
    return {"model.dtype": "float32" if value is False else "bfloat16"}


def stored(value: Any, tree: Tree) -> Tree | Changed:
    """Returns the type of the loaded weights."""
    if value in (None, "auto", "float32"):
        return {}
    return Changed({}, "masters of the weights are float32 here whatever they compute in")


def loggers(value: Any, tree: Tree) -> Tree:
    """Returns the trackers that are here, too."""
    return trackers(value, silent=("none",))


def evaluation(value: Any, tree: Tree) -> dict[str, Any]:
    """Returns how held-out prompts are sampled: TRL samples them like those for training."""
    if value == "no":
        return {}
    count = tree.get("num_generations_eval") or tree["num_generations"]
    return {"rollout.val.n": int(count), "rollout.val.temperature": float(tree["temperature"])}
