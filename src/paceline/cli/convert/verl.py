"""verl's keys and ours."""

from __future__ import annotations

from typing import Any

from paceline.cli.convert.rules import ConversionRule, Tree, renamed, to

# A key that begins so is the same here without the beginning; where there is no such key, it is left out.
PREFIXES = {
    "actor_rollout_ref.actor.": "actor.",
    "actor_rollout_ref.rollout.": "rollout.",
    "actor_rollout_ref.model.": "model.",
    "algorithm.": "algorithm.",
    "critic.": "critic.",
    "data.": "data.",
    "trainer.": "trainer.",
}

_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
_LOSSES = {"vanilla": "ppo_clip"}
_LOSS_MODE = f"{_ACTOR}.policy_loss.loss_mode"
_MEANS_OVER_SEQUENCES = ("geo_mean", "gspo", "sapo")
_RECOMPUTE = {True: "full", False: "none"}
_SCHEDULES = {"warmup_stable_decay": "constant"}


def _reward(path: Any, tree: Tree) -> Tree:
    if not path:
        return {}
    name = tree.get("custom_reward_function.name") or "compute_score"
    return {"reward.functions": [{"name": f"{path}:{name}"}], "data.extra_keys": ["extra_info"]}


def _loggers(value: Any, tree: Tree) -> Tree:
    names = [value] if isinstance(value, str) else list(value or [])
    return {"trainer.loggers": [name for name in names if name != "console"]}


def _aggregation(value: Any, tree: Tree) -> Tree:
    hard_coded = tree.get(_LOSS_MODE) in _MEANS_OVER_SEQUENCES
    return {"actor.loss_agg_mode": None if hard_coded else value}


def _frequency(key: str) -> Any:
    return to(key, by=lambda value: max(0, int(value)))


def _top_k(value: Any, tree: Tree) -> Tree:
    return {"rollout.top_k": max(0, int(value))}


VERL: tuple[ConversionRule, ...] = (
    ConversionRule(theirs="`actor_rollout_ref.actor.X`", ours="`actor.X`"),
    ConversionRule(theirs="`actor_rollout_ref.rollout.X`", ours="`rollout.X`"),
    renamed(
        f"{_MODEL}.path",
        "model.path",
        theirs="`actor_rollout_ref.model.path`",
        says="`model.path`: a folder or URL; `hf download OWNER/NAME --local-dir FOLDER` makes one",
    ),
    renamed("data.reward_fn_key", "data.data_source_key"),
    ConversionRule(
        theirs="`reward_model.ground_truth` (column)",
        ours="`data.ground_truth_key: reward_model.ground_truth`",
        keys=("data.train_files",),
        convert=lambda value, tree: {
            "data.train_files": value,
            "data.ground_truth_key": "reward_model.ground_truth",
        },
    ),
    renamed(
        "data.filter_overlong_prompts",
        "data.overlong_prompts",
        by={True: "filter", False: "error"},
        theirs="`data.filter_overlong_prompts: true`",
        says="`data.overlong_prompts: filter`, the default",
    ),
    ConversionRule(
        theirs="`custom_reward_function.path`, `.name`",
        ours='`reward.functions: [{name: "my/reward.py:compute_score"}]`; see below',
        keys=("custom_reward_function.path",),
        convert=_reward,
    ),
    renamed(
        f"{_ACTOR}.ppo_mini_batch_size",
        "actor.ppo_mini_batch_size",
        says="`actor.ppo_mini_batch_size`: prompts, too",
    ),
    ConversionRule(
        theirs="`actor...ppo_micro_batch_size_per_gpu`, `use_dynamic_bsz`",
        ours="nothing: micro-batches are always filled by tokens, up to `actor.ppo_max_token_len_per_gpu`",
        keys=tuple(
            f"{section}.{name}"
            for section in (_ACTOR, "critic")
            for name in (
                *("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz"),
                *("forward_micro_batch_size", "forward_micro_batch_size_per_gpu"),
            )
        )
        + tuple(
            f"actor_rollout_ref.{section}.log_prob_{name}"
            for section in ("ref", "rollout")
            for name in (
                "micro_batch_size",
                "micro_batch_size_per_gpu",
                "use_dynamic_bsz",
                "max_token_len_per_gpu",
            )
        ),
    ),
    renamed(
        f"{_ACTOR}.clip_ratio_c",
        "actor.clip_ratio_c",
        says="`actor.clip_ratio_c`, with `actor.use_dual_clip`",
    ),
    renamed(_LOSS_MODE, "actor.policy_loss", by=_LOSSES, says="`actor.policy_loss`; `vanilla` is `ppo_clip`"),
    ConversionRule(
        theirs="`actor...loss_agg_mode`",
        ours="`actor.loss_agg_mode`; null for `gspo`, `geo_mean` and `sapo`, of which verl takes the mean "
        "over sequences whatever is written; here the mode is that of KL and entropy, too",
        keys=(f"{_ACTOR}.loss_agg_mode",),
        convert=_aggregation,
    ),
    renamed(f"{_ACTOR}.optim.lr_warmup_steps_ratio", "actor.optim.warmup_steps_ratio"),
    ConversionRule(
        theirs="`actor...optim.warmup_style`, `lr_scheduler_type`",
        ours="`actor.optim.lr_scheduler`",
        keys=(f"{_ACTOR}.optim.warmup_style", f"{_ACTOR}.optim.lr_scheduler_type"),
        convert=to("actor.optim.lr_scheduler", by=_SCHEDULES),
    ),
    renamed(f"{_MODEL}.enable_gradient_checkpointing", "actor.memory.recompute", by=_RECOMPUTE),
    renamed(f"{_ACTOR}.use_torch_compile", "actor.compile"),
    ConversionRule(
        theirs="`rollout.top_k: -1`",
        ours="`rollout.top_k: 0`",
        keys=(f"{_ROLLOUT}.top_k",),
        convert=_top_k,
    ),
    renamed(
        f"{_ROLLOUT}.val_kwargs.n",
        "rollout.val.n",
        theirs="`rollout.val_kwargs.n`, `.temperature`",
        says="`rollout.val.n`, `rollout.val.temperature`",
    ),
    renamed("algorithm.filter_groups.enable", "algorithm.dynamic_sampling.enable"),
    renamed("critic.model.path", "critic.path"),
    renamed("critic.cliprange_value", "critic.vf_clip_param"),
    renamed("trainer.critic_warmup", "critic.warmup"),
    renamed("trainer.total_training_steps", "trainer.total_steps"),
    ConversionRule(
        theirs="`trainer.total_epochs`",
        ours="`trainer.total_steps`: epochs times rows over `data.train_batch_size`",
        keys=("trainer.total_epochs",),
    ),
    ConversionRule(
        theirs="`trainer.n_gpus_per_node`, `nnodes`",
        ours="`placement: auto` takes what is visible; `learner.world_size`, `rollout.replicas`; "
        "[several hosts](several-hosts.md)",
        keys=("trainer.n_gpus_per_node", "trainer.nnodes"),
    ),
    renamed("trainer.experiment_name", "trainer.name"),
    ConversionRule(
        theirs="`trainer.project_name`",
        ours="the tracker's own variable, `WANDB_PROJECT`; [trackers](trackers.md)",
        keys=("trainer.project_name",),
    ),
    ConversionRule(
        theirs="`trainer.logger`",
        ours="`trainer.loggers`, without `console`",
        keys=("trainer.logger",),
        convert=_loggers,
    ),
    renamed("trainer.default_local_dir", "trainer.run_dir"),
    renamed("trainer.resume_mode", "trainer.resume", by={"disable": "never", "resume_path": "auto"}),
    ConversionRule(
        theirs="`trainer.save_freq: -1`, `test_freq: -1`",
        ours="`trainer.save_freq: 0`, `trainer.test_freq: 0`; null validates at the end only",
        keys=("trainer.save_freq",),
        convert=_frequency("trainer.save_freq"),
    ),
    renamed("trainer.max_actor_ckpt_to_keep", "trainer.keep_checkpoints"),
)

# What rows above name in passing.
MORE = {
    f"{_ROLLOUT}.val_kwargs.temperature": to("rollout.val.temperature"),
    "critic.optim.lr_warmup_steps_ratio": to("critic.optim.warmup_steps_ratio"),
    "critic.optim.warmup_style": to("critic.optim.lr_scheduler", by=_SCHEDULES),
    "custom_reward_function.name": lambda value, tree: {},
    "trainer.test_freq": _frequency("trainer.test_freq"),
}
