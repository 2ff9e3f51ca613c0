"""Converts verl's policy losses, clip ranges, rollout correction and step counts to ours."""

from __future__ import annotations

from typing import Any

from paceline.cli.convert.rules import NUM_ROWS, Changed, Tree, number

ACTOR = "actor_rollout_ref.actor"
MODE = f"{ACTOR}.policy_loss.loss_mode"
_MEANS_OVER_SEQUENCES = ("geo_mean", "gspo", "sapo")


def clip_range(value: Any, tree: Tree) -> Tree:
    """Returns the clip range on both sides; verl reads clip_ratio only for a side that is null."""
    low, high = (
        number(tree[f"{ACTOR}.clip_ratio"] if tree[f"{ACTOR}.{side}"] is None else tree[f"{ACTOR}.{side}"])
        for side in ("clip_ratio_low", "clip_ratio_high")
    )
    if low == high:
        return {"actor.clip_ratio": low}
    return {"actor.clip_ratio_low": low, "actor.clip_ratio_high": high}


def loss(value: Any, tree: Tree) -> Tree:
    """Returns the policy loss with its own options."""
    own = {name: tree.get(f"{ACTOR}.policy_loss.{name}") for name in ("clip_cov_lb", "clip_cov_ub")}
    if value in ("vanilla", "ppo_clip"):
        return {"actor.policy_loss": "ppo_clip"}
    if value == "sapo":
        gate = {"tau_positive": tree[f"{ACTOR}.tau_pos"], "tau_negative": tree[f"{ACTOR}.tau_neg"]}
        return {"actor.policy_loss": {"type": "sapo", **{k: number(v) for k, v in gate.items()}}}
    if value == "clip_cov":
        share = number(tree[f"{ACTOR}.policy_loss.clip_cov_ratio"])
        band = {"cov_low": number(own["clip_cov_lb"]), "cov_high": number(own["clip_cov_ub"])}
        return {"actor.policy_loss": {"type": "clip_cov", "cov_fraction": share, **band}}
    if value == "kl_cov":
        share = number(tree[f"{ACTOR}.policy_loss.kl_cov_ratio"])
        weight = number(tree[f"{ACTOR}.policy_loss.ppo_kl_coef"])
        return {"actor.policy_loss": {"type": "kl_cov", "cov_fraction": share, "cov_kl_coef": weight}}
    if value in ("gspo", "geo_mean", "cispo", "gpg"):
        return {"actor.policy_loss": value}
    raise ValueError(
        f"there is no loss {value}; see actor.policy_loss, or write one (docs/add-an-algorithm.md)"
    )


def router_replay(value: Any, tree: Tree) -> Tree:
    """Returns whether the learner takes the engine's choices of experts.

    Raises:
        ValueError: it is to take its own of the old log-probs, which the first update computes itself.
    """
    if value in ("disabled", "R3"):
        return {"actor.router_replay": value == "R3"}
    raise ValueError(
        f"{value} repeats the learner's own choices of the old log-probs; write R3, which repeats those of "
        "the engine in old log-probs, reference and update"
    )


def aggregation(value: Any, tree: Tree) -> Tree:
    """Returns the aggregation, which three of verl's losses ignore."""
    if tree[MODE] in _MEANS_OVER_SEQUENCES:
        return {"actor.loss_agg_mode": None}
    ours = {"actor.loss_agg_mode": value}
    divisor = tree.get(f"{ACTOR}.loss_scale_factor")
    if value != "seq-mean-token-sum-norm" or divisor is None:
        return ours
    return ours | {"actor.loss_agg_constant": number(divisor)}


def correction(value: Any, tree: Tree) -> Tree:
    """Converts the correction for the difference between sampler and learner."""
    if value is None:
        return {}
    key = "algorithm.rollout_correction"
    bound = str(tree[f"{key}.rollout_is_threshold"])
    low, separator, high = bound.rpartition("_")
    if separator:
        if value != "token":
            raise ValueError(f"bounds on both sides are only for tokens; see {key}.method: icepop")
        return {f"{key}.method": "icepop", f"{key}.low": number(low), f"{key}.high": number(high)}
    return {f"{key}.method": "tis", f"{key}.level": value, f"{key}.cap": number(bound)}


def length(value: Any, tree: Tree) -> Tree:
    """Returns the run's length: total_training_steps, or total_epochs, in which only full batches count."""
    if tree.get("trainer.total_training_steps") is not None:
        return {"trainer.total_steps": int(tree["trainer.total_training_steps"])}
    return {"trainer.total_epochs": int(value)}


def _total_steps(tree: Tree) -> int:
    if tree.get("trainer.total_training_steps") is not None:
        return int(tree["trainer.total_training_steps"])
    batch, epochs = int(tree["data.train_batch_size"]), int(tree["trainer.total_epochs"])
    rows = tree.get(NUM_ROWS)
    if rows is None:
        raise ValueError(
            f"is a share of the steps here; their number, {epochs} x (rows // {batch}), depends on training "
            "files that are not on this machine"
        )
    return epochs * (int(rows) // batch)


def warmup(section: str, ours: str) -> Any:
    """Returns the share of the run over which the rate rises: from a number of steps, or else the ratio."""

    def convert(value: Any, tree: Tree) -> Tree:
        steps = int(tree.get(f"{section}.lr_warmup_steps", -1) or -1)
        if steps < 0:
            return {f"{ours}.warmup_steps_ratio": number(tree[f"{section}.lr_warmup_steps_ratio"])}
        return {f"{ours}.warmup_steps_ratio": steps / _total_steps(tree)}

    return convert


def schedule(section: str, ours: str) -> Any:
    """Returns the schedule of the rate; as in verl, the key's older name takes precedence."""

    def convert(value: Any, tree: Tree) -> Tree | Changed:
        shape = tree.get(f"{section}.warmup_style") or tree[f"{section}.lr_scheduler_type"]
        if shape not in ("constant", "cosine"):
            raise ValueError(f"there is no schedule {shape}; see {ours}.lr_scheduler")
        values = {f"{ours}.lr_scheduler": shape}
        if shape == "constant":
            return values
        return Changed(values, "step s has the rate that verl gives the step after it")

    return convert
