"""The keys of verl's trainer and ours."""

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
        renamed(f"{theirs}.lr", f"{ours}.lr", 5e-7, default=rate, by=number),
        renamed(f"{theirs}.weight_decay", f"{ours}.weight_decay", 0.1, default=0.01, by=number),
        renamed(f"{theirs}.betas", f"{ours}.betas", [0.9, 0.95], default=[0.9, 0.999], by=list),
        renamed(f"{theirs}.min_lr_ratio", f"{ours}.min_lr_ratio", 0.1, default=0.0, by=number),
        rule(
            f"{theirs}.lr_warmup_steps_ratio",
            f"`{ours}.warmup_steps_ratio`",
            losses.warmup(theirs, ours),
            ({f"{theirs}.lr_warmup_steps_ratio": 0.1}, {f"{ours}.warmup_steps_ratio": 0.1}),
            (
                {f"{theirs}.lr_warmup_steps": 9, "trainer.total_training_steps": 90},
                {f"{ours}.warmup_steps_ratio": 0.1},
            ),
            default=0.0,
        ),
        part(f"{theirs}.lr_warmup_steps", f"{theirs}.lr_warmup_steps_ratio", unset=(None, -1)),
        rule(
            f"{theirs}.lr_scheduler_type {theirs}.warmup_style",
            f"`{ours}.lr_scheduler`",
            losses.schedule(theirs, ours),
            ({f"{theirs}.warmup_style": "cosine"}, {f"{ours}.lr_scheduler": "cosine"}),
            ({f"{theirs}.lr_scheduler_type": "constant"}, {f"{ours}.lr_scheduler": "constant"}),
            ({f"{theirs}.lr_scheduler_type": "wsd"}, None),
            default="constant",
        ),
        only("a fall takes half a cosine", f"{theirs}.num_cycles", neutral=(None, 0.5), example=2.0),
        rule(
            f"{theirs}.optimizer",
            f"`{ours}.type`",
            optimizer(ours, exact=("AdamW",), compact=("AdamW8bit",)),
            ({f"{theirs}.optimizer": "AdamW8bit"}, {f"{ours}.type": "adamw_8bit"}),
            ({f"{theirs}.optimizer": "AdamW"}, {f"{ours}.type": "adamw"}),
            ({f"{theirs}.optimizer": "SGD"}, None),
        ),
        part(f"{theirs}.optimizer_impl", f"{theirs}.optimizer", unset=(None, "torch.optim")),
        only(
            "AdamW is the optimizer",
            f"{theirs}.override_optimizer_config {theirs}.override_optimizer_config.*",
            neutral=(None,),
            example="x",
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
        (
            {"data.train_files": "t.parquet"},
            {"data.train_files": "t.parquet", "data.ground_truth_key": "reward_model.ground_truth"},
        ),
    ),
    *same(
        "data",
        "data",
        {
            "val_files": ("v.parquet", UNSET),
            "prompt_key": ("question", "prompt"),
            "max_prompt_length": (99, 512),
            "max_response_length": (98, 512),
            "train_batch_size": (512, 1024),
            "shuffle": (False, True),
            "seed": (3, UNSET),
        },
    ),
    renamed("data.reward_fn_key", "data.data_source_key", "kind", default="data_source"),
    renamed("data.val_max_samples", "data.val_max_prompts", 64, unset=(None, -1)),
    renamed("data.train_max_samples", "data.train_max_prompts", 100, unset=(None, -1)),
    renamed("data.image_key", "data.image_key", "pictures", unset=(None, "images")),
    rule(
        "data.filter_overlong_prompts",
        "`data.overlong_prompts`",
        data.overlong,
        ({"data.filter_overlong_prompts": True}, {"data.overlong_prompts": "filter"}),
        ({"data.filter_overlong_prompts": False}, {"data.overlong_prompts": "error"}),
        (
            {"data.filter_overlong_prompts": False, "data.truncation": "left"},
            {"data.overlong_prompts": "error"},
        ),
        default=False,
    ),
    part("data.truncation", "data.filter_overlong_prompts", default="error"),
    part("data.gen_batch_size", "algorithm.filter_groups.enable"),
)

_POLICY = (
    renamed(f"{_MODEL}.path", "model.path", "m"),
    renamed(f"{_MODEL}.tokenizer_path", "model.tokenizer_path", "t"),
    rule(
        f"{_MODEL}.lora_rank {_MODEL}.lora.rank",
        "`model.lora`; 0 is none",
        data.lora,
        (
            {f"{_MODEL}.lora_rank": 8},
            {"model.lora.rank": 8, "model.lora.alpha": 16.0, "model.lora.targets": ["all"]},
        ),
        (
            {f"{_MODEL}.lora.rank": 8, f"{_MODEL}.lora.target_modules": ["linear_qkv"]},
            {
                "model.lora.rank": 8,
                "model.lora.alpha": 32.0,
                "model.lora.targets": ["q_proj", "k_proj", "v_proj"],
            },
        ),
        ({f"{_MODEL}.lora_rank": 0}, {}),
    ),
    part(f"{_MODEL}.lora_alpha", f"{_MODEL}.lora_rank", default=16),
    part(f"{_MODEL}.target_modules", f"{_MODEL}.lora_rank", default="all-linear"),
    part(f"{_MODEL}.lora.alpha", f"{_MODEL}.lora.rank", default=32),
    part(f"{_MODEL}.lora.target_modules", f"{_MODEL}.lora.rank"),
    *same(
        _ACTOR,
        "actor",
        {
            "ppo_mini_batch_size": (32, 256),
            "ppo_epochs": (2, 1),
            "clip_ratio_c": (4.0, 3.0),
            "entropy_coeff": (0.01, 0),
            "use_kl_loss": (True, False),
            "kl_loss_coef": (0.002, 0.001),
            "kl_loss_type": ("mse", "low_var_kl"),
            "grad_clip": (0.5, 1.0),
        },
    ),
    rule(
        f"{_ACTOR}.clip_ratio_low {_ACTOR}.clip_ratio_high {_ACTOR}.clip_ratio",
        "`actor.clip_ratio`, or `.clip_ratio_low` and `.clip_ratio_high`: verl reads its `clip_ratio` only "
        "where those are null, and they are 0.2",
        losses.clip_range,
        (
            {f"{_ACTOR}.clip_ratio_high": 0.28},
            {"actor.clip_ratio_low": 0.2, "actor.clip_ratio_high": 0.28},
        ),
        ({f"{_ACTOR}.clip_ratio": 0.3}, {"actor.clip_ratio": 0.2}),
        (
            {
                f"{_ACTOR}.clip_ratio": 0.3,
                f"{_ACTOR}.clip_ratio_low": None,
                f"{_ACTOR}.clip_ratio_high": None,
            },
            {"actor.clip_ratio": 0.3},
        ),
        default={f"{_ACTOR}.clip_ratio{side}": 0.2 for side in ("", "_low", "_high")},
        unset=(),
    ),
    rule(
        losses.MODE,
        "`actor.policy_loss` with its options",
        losses.loss,
        ({losses.MODE: "vanilla"}, {"actor.policy_loss": "ppo_clip"}),
        ({losses.MODE: "cispo"}, {"actor.policy_loss": "cispo"}),
        (
            {losses.MODE: "kl_cov"},
            {"actor.policy_loss": {"type": "kl_cov", "cov_fraction": 2e-4, "cov_kl_coef": 0.1}},
        ),
        (
            {losses.MODE: "clip_cov", f"{_ACTOR}.policy_loss.clip_cov_ub": 4.0},
            {
                "actor.policy_loss": {
                    "type": "clip_cov",
                    "cov_fraction": 2e-4,
                    "cov_low": 1.0,
                    "cov_high": 4.0,
                }
            },
        ),
        (
            {losses.MODE: "sapo", f"{_ACTOR}.tau_neg": 1.1},
            {
                "actor.policy_loss": {"type": "sapo", "tau_positive": 1.0, "tau_negative": 1.1},
            },
        ),
        ({losses.MODE: "dppo_tv"}, None),
        default="vanilla",
    ),
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
        (
            {f"{_ACTOR}.loss_agg_mode": "seq-mean-token-sum"},
            {"actor.loss_agg_mode": "seq-mean-token-sum"},
        ),
        (
            {
                f"{_ACTOR}.loss_agg_mode": "token-mean",
                losses.MODE: "gspo",
                f"{_ACTOR}.clip_ratio_low": 3e-4,
                f"{_ACTOR}.clip_ratio_high": 4e-4,
            },
            {"actor.loss_agg_mode": None, "actor.policy_loss": "gspo"},
        ),
        (
            {
                f"{_ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
                f"{_ACTOR}.loss_scale_factor": 512,
            },
            {"actor.loss_agg_mode": "seq-mean-token-sum-norm", "actor.loss_agg_constant": 512.0},
        ),
        default="token-mean",
    ),
    part(f"{_ACTOR}.loss_scale_factor", f"{_ACTOR}.loss_agg_mode"),
    *_optimizer(f"{_ACTOR}.optim", "actor.optim", 1e-6),
    rule(
        f"{_ACTOR}.fsdp_config.dtype",
        "`model.dtype`",
        data.precision,
        ({f"{_ACTOR}.fsdp_config.dtype": "float32"}, {"model.dtype": "float32"}),
        ({f"{_ACTOR}.fsdp_config.dtype": "float16"}, None),
        default="bfloat16",
    ),
    rule(
        f"{_ACTOR}.fsdp_config.model_dtype",
        "nothing: the weights that the optimizer changes are float32",
        data.masters,
        ({f"{_ACTOR}.fsdp_config.model_dtype": "bf16"}, {}),
    ),
    renamed(f"{_ACTOR}.fsdp_config.optimizer_offload", "actor.memory.offload", True, unset=(None, False)),
    rule(
        f"{_REF}.fsdp_config.param_offload",
        "`actor.memory.offload_reference`, where a KL needs a reference that has weights of its own",
        data.offload_reference,
        ({f"{_REF}.fsdp_config.param_offload": True}, {}),
        (
            {f"{_REF}.fsdp_config.param_offload": True, f"{_ACTOR}.use_kl_loss": True},
            {"actor.memory.offload_reference": True, "actor.use_kl_loss": True},
        ),
    ),
    *same(
        _ROLLOUT,
        "rollout",
        {
            "n": (5, 1),
            "temperature": (0.9, 1.0),
            "gpu_memory_utilization": (0.6, UNSET),
            "tensor_model_parallel_size": (2, UNSET),
            "max_num_seqs": (512, UNSET),
            "enforce_eager": (True, UNSET),
        },
    ),
    renamed(f"{_ROLLOUT}.val_kwargs.n", "rollout.val.n", 4, default=1),
    renamed(f"{_ROLLOUT}.val_kwargs.temperature", "rollout.val.temperature", 0.5, default=0),
    renamed(f"{_ROLLOUT}.val_kwargs.top_p", "rollout.val.top_p", 0.7, default=1),
    renamed(
        f"{_ROLLOUT}.val_kwargs.top_k", "rollout.val.top_k", -1, by=lambda k: max(0, k), becomes=0, default=-1
    ),
)

_ALGORITHM = (
    rule(
        "algorithm.adv_estimator",
        "`algorithm.adv_estimator`",
        data.estimator,
        ({"algorithm.adv_estimator": "grpo"}, {"algorithm.adv_estimator": "grpo"}),
        ({"algorithm.adv_estimator": "grpo_passk"}, {"algorithm.adv_estimator": "pass_at_k"}),
        ({"algorithm.adv_estimator": "gdpo"}, None),
        default="gae",
    ),
    *same(
        "algorithm",
        "algorithm",
        {
            "gamma": (0.99, 1.0),
            "lam": (0.95, 1.0),
            "norm_adv_by_std_in_grpo": (False, True),
            "use_kl_in_reward": (True, False),
            "kl_penalty": ("abs", "kl"),
        },
    ),
    *same(_KL, _KL, {"kl_coef": (0.003, 0.001), "horizon": (5000, 10000), "target_kl": (0.2, 0.1)}),
    renamed(f"{_KL}.type", f"{_KL}.type", "fixed", default="fixed"),
    rule(
        "algorithm.filter_groups.enable",
        "`algorithm.dynamic_sampling`",
        data.extra_prompts,
        (
            {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 10},
            {
                "algorithm.dynamic_sampling.enable": True,
                "algorithm.dynamic_sampling.max_extra_factor": 9.0,
            },
        ),
        ({"algorithm.filter_groups.enable": False}, {}),
    ),
    part(
        "algorithm.filter_groups.metric algorithm.filter_groups.max_num_gen_batches "
        "algorithm.filter_groups.max_inflight_gen_batches",
        "algorithm.filter_groups.enable",
    ),
    rule(
        "algorithm.rollout_correction.rollout_is",
        "`algorithm.rollout_correction`",
        losses.correction,
        (
            {
                "algorithm.rollout_correction.rollout_is": "token",
                "algorithm.rollout_correction.rollout_is_threshold": 3.0,
            },
            {
                "algorithm.rollout_correction.method": "tis",
                "algorithm.rollout_correction.level": "token",
                "algorithm.rollout_correction.cap": 3.0,
            },
        ),
        (
            {
                "algorithm.rollout_correction.rollout_is": "token",
                "algorithm.rollout_correction.rollout_is_threshold": "0.5_5.0",
            },
            {
                "algorithm.rollout_correction.method": "icepop",
                "algorithm.rollout_correction.low": 0.5,
                "algorithm.rollout_correction.high": 5.0,
            },
        ),
    ),
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
        (
            {"algorithm.use_pf_ppo": True, "algorithm.pf_ppo.weight_pow": 1.5},
            {"algorithm.resample.method": "pow", "algorithm.resample.power": 1.5},
        ),
    ),
    part("algorithm.pf_ppo.reweight_method", "algorithm.use_pf_ppo", default="pow"),
    part("algorithm.pf_ppo.weight_pow", "algorithm.use_pf_ppo", default=2.0),
    rule(
        "critic.model.path",
        "`critic.path`, with an estimator that needs a critic",
        lambda value, tree: {"critic.path": value} if tree["algorithm.adv_estimator"] == "gae" else {},
        ({"critic.model.path": "c"}, {"critic.path": "c"}),
    ),
    renamed("critic.cliprange_value", "critic.vf_clip_param", 0.4, default=0.5),
    renamed("critic.ppo_mini_batch_size", "critic.ppo_mini_batch_size", 32),
    renamed("critic.ppo_epochs", "critic.ppo_epochs", 2),
    renamed("critic.grad_clip", "critic.grad_clip", 0.5, default=1.0),
    *_optimizer("critic.optim", "critic.optim", 1e-5),
)

_REWARD = (
    rule(
        f"{data.FUNCTION}.path reward.{data.FUNCTION}.path",
        "`reward.functions`, called verl's way; without one, verl's scores of GSM8K and MATH",
        data.reward,
        (
            {f"{data.FUNCTION}.path": "r.py", f"{data.FUNCTION}.reward_kwargs.k": 2},
            {
                "reward.functions": [{"name": "r.py:compute_score", "kwargs": {"k": 2}}],
                "data.extra_keys": ["extra_info"],
            },
        ),
        (
            {f"reward.{data.FUNCTION}.path": "r.py", f"reward.{data.FUNCTION}.name": "f"},
            {"reward.functions": [{"name": "r.py:f"}], "data.extra_keys": ["extra_info"]},
        ),
        default=None,
    ),
    part(
        f"{data.FUNCTION}.name reward.{data.FUNCTION}.name {data.FUNCTION}.reward_kwargs.* "
        f"reward.{data.FUNCTION}.reward_kwargs.*",
        f"{data.FUNCTION}.path",
    ),
    rule(
        "reward_model.enable reward.reward_model.enable",
        "`reward.models`",
        data.reward_model,
        (
            {"reward_model.enable": True, "reward_model.model.path": "rm"},
            {"reward.models": [{"name": "reward_model", "path": "rm"}]},
        ),
        ({"reward_model.enable": False}, {}),
    ),
    part("reward_model.model.path reward.reward_model.model_path", "reward_model.enable"),
    rule(
        "reward_model.overlong_buffer.enable reward_model.reward_kwargs.overlong_buffer_cfg.enable "
        "reward.reward_kwargs.overlong_buffer_cfg.enable",
        "`algorithm.overlong`",
        data.penalty,
        (
            {"reward_model.overlong_buffer.enable": True, "reward_model.overlong_buffer.len": 64},
            {
                "algorithm.overlong.enable": True,
                "algorithm.overlong.buffer_length": 64,
                "algorithm.overlong.factor": 1.0,
            },
        ),
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
        ({"trainer.total_epochs": 15}, {"trainer.total_epochs": 15}),
        ({"trainer.total_training_steps": 90}, {"trainer.total_steps": 90}),
        default=30,
    ),
    part("trainer.total_training_steps", "trainer.total_epochs"),
    renamed("trainer.critic_warmup", "critic.warmup", 3, default=0),
    renamed("trainer.save_freq", "trainer.save_freq", -1, default=-1, by=_frequency, becomes=0),
    renamed("trainer.test_freq", "trainer.test_freq", 7, default=-1, by=_frequency),
    renamed("trainer.val_before_train", "trainer.val_before_train", False, default=True),
    renamed("trainer.experiment_name", "trainer.name", "x"),
    renamed("trainer.default_local_dir", "trainer.run_dir", "runs/x"),
    renamed("trainer.max_actor_ckpt_to_keep", "trainer.keep_checkpoints", 2),
    rule(
        "trainer.logger",
        "`trainer.loggers`, without `console`",
        data.loggers,
        ({"trainer.logger": ["console", "wandb"]}, {"trainer.loggers": ["wandb"]}),
        ({"trainer.logger": "console"}, {"trainer.loggers": []}),
        ({"trainer.logger": ["swanlab"]}, None),
    ),
    rule(
        "trainer.resume_mode",
        "`trainer.resume`",
        data.resume,
        ({"trainer.resume_mode": "disable"}, {"trainer.resume": "never"}),
        ({"trainer.resume_mode": "auto"}, {"trainer.resume": "auto"}),
        ({"trainer.resume_mode": "resume_path"}, None),
    ),
)

RULES: tuple[ConversionRule, ...] = (*_DATA, *_POLICY, *_ALGORITHM, *_REWARD, *_TRAINER, *REST)
