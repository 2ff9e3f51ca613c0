"""The table of verl's keys and ours."""

from __future__ import annotations

from typing import Any

from paceline.cli.convert.rules import (
    UNSET,
    ConversionRule,
    no_effect,
    number,
    only,
    optimizer,
    part,
    renamed,
    rule,
    same,
)
from paceline.cli.convert.verl import data, losses
from paceline.cli.convert.verl.rest import REST

_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
_KL, _REF = "algorithm.kl_ctrl", "actor_rollout_ref.ref"


def _frequency(value: Any) -> int:
    return max(0, int(value))


def _optimizer(theirs: str, ours: str, rate: float) -> tuple[ConversionRule, ...]:
    return (
        renamed(f"{theirs}.lr", f"{ours}.lr", default=rate, by=number),
        renamed(f"{theirs}.weight_decay", f"{ours}.weight_decay", default=0.01, by=number),
        renamed(f"{theirs}.betas", f"{ours}.betas", default=[0.9, 0.999], by=list),
        renamed(f"{theirs}.min_lr_ratio", f"{ours}.min_lr_ratio", default=0.0, by=number),
        rule(
            f"{theirs}.lr_warmup_steps_ratio",
            f"`{ours}.warmup_steps_ratio`",
            losses.warmup(theirs, ours),
            default=0.0,
        ),
        part(f"{theirs}.lr_warmup_steps", f"{theirs}.lr_warmup_steps_ratio", unset=(None, -1)),
        rule(
            f"{theirs}.lr_scheduler_type {theirs}.warmup_style",
            f"`{ours}.lr_scheduler`",
            losses.schedule(theirs, ours),
            default="constant",
        ),
        only("a fall takes half a cosine", f"{theirs}.num_cycles", neutral=(None, 0.5)),
        rule(
            f"{theirs}.optimizer", f"`{ours}.type`", optimizer(ours, exact=("AdamW",), compact=("AdamW8bit",))
        ),
        part(f"{theirs}.optimizer_impl", f"{theirs}.optimizer", unset=(None, "torch.optim")),
        only(
            "AdamW is the optimizer",
            f"{theirs}.override_optimizer_config {theirs}.override_optimizer_config.*",
            neutral=(None,),
        ),
        no_effect(
            "the schedule runs over `trainer.total_steps`, the norm's bound is `grad_clip`",
            f"{theirs}.total_training_steps {theirs}.clip_grad {theirs}.zero_indexed_step",
        ),
    )


_DATA = (
    rule(
        "data.train_files",
        "`data.train_files`, with `data.ground_truth_key: reward_model.ground_truth`",
        data.files,
    ),
    *same(
        "data",
        "data",
        {
            "val_files": UNSET,
            "prompt_key": "prompt",
            "max_prompt_length": 512,
            "max_response_length": 512,
            "train_batch_size": 1024,
            "shuffle": True,
            "seed": UNSET,
        },
    ),
    renamed("data.reward_fn_key", "data.data_source_key", default="data_source"),
    renamed("data.val_max_samples", "data.val_max_prompts", unset=(None, -1)),
    renamed("data.train_max_samples", "data.train_max_prompts", unset=(None, -1)),
    renamed("data.image_key", "data.image_key", unset=(None, "images")),
    rule("data.filter_overlong_prompts", "`data.overlong_prompts`", data.overlong, default=False),
    part("data.truncation", "data.filter_overlong_prompts", default="error"),
    part("data.gen_batch_size", "algorithm.filter_groups.enable"),
)

_POLICY = (
    renamed(f"{_MODEL}.path", "model.path"),
    renamed(f"{_MODEL}.tokenizer_path", "model.tokenizer_path"),
    rule(f"{_MODEL}.lora_rank {_MODEL}.lora.rank", "`model.lora`; 0 is none", data.lora),
    rule(f"{_ACTOR}.freeze_vision_tower", "`model.vision.train`", data.vision, default=False),
    part(f"{_MODEL}.lora_alpha", f"{_MODEL}.lora_rank", default=16),
    part(f"{_MODEL}.target_modules", f"{_MODEL}.lora_rank", default="all-linear"),
    part(f"{_MODEL}.lora.alpha", f"{_MODEL}.lora.rank", default=32),
    part(f"{_MODEL}.lora.target_modules", f"{_MODEL}.lora.rank"),
    *same(
        _ACTOR,
        "actor",
        {
            "ppo_mini_batch_size": 256,
            "ppo_epochs": 1,
            "clip_ratio_c": 3.0,
            "entropy_coeff": 0,
            "use_kl_loss": False,
            "kl_loss_coef": 0.001,
            "kl_loss_type": "low_var_kl",
            "grad_clip": 1.0,
        },
    ),
    rule(
        f"{_ACTOR}.clip_ratio_low {_ACTOR}.clip_ratio_high {_ACTOR}.clip_ratio",
        "`actor.clip_ratio`, or `.clip_ratio_low` and `.clip_ratio_high`: verl reads its `clip_ratio` only "
        "where those are null, and they are 0.2",
        losses.clip_range,
        default={f"{_ACTOR}.clip_ratio{side}": 0.2 for side in ("", "_low", "_high")},
        unset=(),
    ),
    rule(
        f"{_ACTOR}.router_replay.mode",
        "`actor.router_replay` for R3, with the engine's choices of experts",
        losses.router_replay,
        default="disabled",
    ),
    rule(losses.MODE, "`actor.policy_loss` with its options", losses.loss, default="vanilla"),
    part(f"{_ACTOR}.tau_pos", losses.MODE, default=1.0),
    part(f"{_ACTOR}.tau_neg", losses.MODE, default=1.05),
    part(f"{_ACTOR}.policy_loss.clip_cov_ratio", losses.MODE, default=0.0002),
    part(f"{_ACTOR}.policy_loss.clip_cov_lb", losses.MODE, default=1.0),
    part(f"{_ACTOR}.policy_loss.clip_cov_ub", losses.MODE, default=5.0),
    part(f"{_ACTOR}.policy_loss.kl_cov_ratio", losses.MODE, default=0.0002),
    part(f"{_ACTOR}.policy_loss.ppo_kl_coef", losses.MODE, default=0.1),
    rule(
        f"{_ACTOR}.loss_agg_mode",
        "`actor.loss_agg_mode`, for KL and entropy, too; null for `gspo`, `geo_mean` and `sapo`, of which "
        "verl takes the mean over sequences whatever is written",
        losses.aggregation,
        default="token-mean",
    ),
    part(f"{_ACTOR}.loss_scale_factor", f"{_ACTOR}.loss_agg_mode"),
    *_optimizer(f"{_ACTOR}.optim", "actor.optim", 1e-6),
    rule(f"{_ACTOR}.fsdp_config.dtype", "`model.dtype`", data.precision, default="bfloat16"),
    rule(
        f"{_ACTOR}.fsdp_config.model_dtype",
        "nothing: the weights that the optimizer changes are float32",
        data.masters,
    ),
    renamed(f"{_ACTOR}.fsdp_config.optimizer_offload", "actor.memory.offload", unset=(None, False)),
    rule(
        f"{_REF}.fsdp_config.param_offload",
        "`actor.memory.offload_reference`, where a KL needs a reference that has weights of its own",
        data.offload_reference,
    ),
    *same(
        _ROLLOUT,
        "rollout",
        {
            "n": 1,
            "temperature": 1.0,
            "gpu_memory_utilization": UNSET,
            "tensor_model_parallel_size": UNSET,
            "max_num_seqs": UNSET,
            "enforce_eager": UNSET,
        },
    ),
    renamed(f"{_ROLLOUT}.val_kwargs.n", "rollout.val.n", default=1),
    renamed(f"{_ROLLOUT}.val_kwargs.temperature", "rollout.val.temperature", default=0),
    renamed(f"{_ROLLOUT}.val_kwargs.top_p", "rollout.val.top_p", default=1),
    renamed(f"{_ROLLOUT}.val_kwargs.top_k", "rollout.val.top_k", by=lambda k: max(0, k), default=-1),
)

_ALGORITHM = (
    rule("algorithm.adv_estimator", "`algorithm.adv_estimator`", data.estimator, default="gae"),
    *same(
        "algorithm",
        "algorithm",
        {
            "gamma": 1.0,
            "lam": 1.0,
            "norm_adv_by_std_in_grpo": True,
            "use_kl_in_reward": False,
            "kl_penalty": "kl",
        },
    ),
    *same(_KL, _KL, {"kl_coef": 0.001, "horizon": 10000, "target_kl": 0.1}),
    renamed(f"{_KL}.type", f"{_KL}.type", default="fixed"),
    rule("algorithm.filter_groups.enable", "`algorithm.dynamic_sampling`", data.extra_prompts),
    part(
        "algorithm.filter_groups.metric algorithm.filter_groups.max_num_gen_batches "
        "algorithm.filter_groups.max_inflight_gen_batches",
        "algorithm.filter_groups.enable",
    ),
    rule("algorithm.rollout_correction.rollout_is", "`algorithm.rollout_correction`", losses.correction),
    part(
        "algorithm.rollout_correction.rollout_is_threshold",
        "algorithm.rollout_correction.rollout_is",
        default=2.0,
    ),
    rule(
        "algorithm.use_pf_ppo",
        "`algorithm.resample`",
        lambda value, tree: (
            {
                "algorithm.resample.method": tree["algorithm.pf_ppo.reweight_method"],
                "algorithm.resample.power": number(tree["algorithm.pf_ppo.weight_pow"]),
            }
            if value
            else {}
        ),
    ),
    part("algorithm.pf_ppo.reweight_method", "algorithm.use_pf_ppo", default="pow"),
    part("algorithm.pf_ppo.weight_pow", "algorithm.use_pf_ppo", default=2.0),
    rule(
        "critic.model.path",
        "`critic.path`, with an estimator that needs a critic",
        lambda value, tree: {"critic.path": value} if tree["algorithm.adv_estimator"] == "gae" else {},
    ),
    renamed("critic.cliprange_value", "critic.vf_clip_param", default=0.5),
    renamed("critic.ppo_mini_batch_size", "critic.ppo_mini_batch_size"),
    renamed("critic.ppo_epochs", "critic.ppo_epochs"),
    renamed("critic.grad_clip", "critic.grad_clip", default=1.0),
    *_optimizer("critic.optim", "critic.optim", 1e-5),
)

_REWARD = (
    rule(
        f"{data.FUNCTION}.path reward.{data.FUNCTION}.path",
        "`reward.functions`, called verl's way; without one, verl's scores of GSM8K and MATH",
        data.reward,
        default=None,
    ),
    part(
        f"{data.FUNCTION}.name reward.{data.FUNCTION}.name {data.FUNCTION}.reward_kwargs.* "
        f"reward.{data.FUNCTION}.reward_kwargs.*",
        f"{data.FUNCTION}.path",
    ),
    rule("reward_model.enable reward.reward_model.enable", "`reward.models`", data.reward_model),
    part("reward_model.model.path reward.reward_model.model_path", "reward_model.enable"),
    rule(
        "reward_model.overlong_buffer.enable reward_model.reward_kwargs.overlong_buffer_cfg.enable "
        "reward.reward_kwargs.overlong_buffer_cfg.enable",
        "`algorithm.overlong`",
        data.penalty,
    ),
    part(
        "reward_model.overlong_buffer.* reward_model.reward_kwargs.* reward.reward_kwargs.*",
        "reward_model.overlong_buffer.enable",
    ),
)

_TRAINER = (
    rule(
        "trainer.total_epochs",
        "`trainer.total_epochs`, or `trainer.total_steps` for `total_training_steps`",
        losses.length,
        default=30,
    ),
    part("trainer.total_training_steps", "trainer.total_epochs"),
    renamed("trainer.critic_warmup", "critic.warmup", default=0),
    renamed("trainer.save_freq", "trainer.save_freq", default=-1, by=_frequency),
    renamed("trainer.test_freq", "trainer.test_freq", default=-1, by=_frequency),
    renamed("trainer.val_before_train", "trainer.val_before_train", default=True),
    renamed("trainer.experiment_name", "trainer.name"),
    renamed("trainer.default_local_dir", "trainer.run_dir"),
    renamed("trainer.max_actor_ckpt_to_keep", "trainer.keep_checkpoints"),
    rule("trainer.logger", "`trainer.loggers`, without `console`", data.loggers),
    rule("trainer.resume_mode", "`trainer.resume`", data.resume),
)

RULES: tuple[ConversionRule, ...] = (*_DATA, *_POLICY, *_ALGORITHM, *_REWARD, *_TRAINER, *REST)
