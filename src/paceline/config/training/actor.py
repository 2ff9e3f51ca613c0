"""`actor.*` and `critic.*`: the updates."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from paceline.config.base import Section
from paceline.config.training.algorithm import KL_KINDS, KLKind
from paceline.config.training.memory import ActorMemory, ActorMemoryConfig
from paceline.config.training.policy_losses import Aggregation, Clip, PolicyLossConfig, PPOClip
from paceline.core.errors import ConfigError

# YAML 1.1 reads a bare on and off as booleans.
SharedPrompts = Annotated[
    Literal["auto", "on", "off"],
    BeforeValidator(lambda given: ("off", "on")[given] if isinstance(given, bool) else given),
]

AttentionKernel = Literal["auto", "torch", "flash_attention_4"]


class OptimConfig(Section):
    """The optimizer and its schedule; the learning rate changes once per training step."""

    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    type: Literal["adamw", "muon"] = Field(
        "adamw",
        description="adamw: AdamW. muon: Muon for the matrices of the layers, whose steps are as long as "
        "AdamW's at the same lr, and which has one average in place of two; AdamW for embeddings, the head, "
        "vectors, and experts that are stored together.",
    )
    lr_scheduler: Literal["constant", "linear", "cosine", "cosine_with_restarts"] = Field(
        "constant", description="Shape after the warm-up, over the rest of trainer.total_steps."
    )
    lr_cycles: int = Field(
        1, gt=0, description="cosine_with_restarts: how often the rate falls; each fall begins at lr."
    )
    warmup_steps_ratio: float = Field(
        0.0, ge=0, lt=1, description="Share of trainer.total_steps over which the rate rises linearly from 0."
    )
    min_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="The last learning rate of all shapes that fall, as a share of lr."
    )
    weight_decay: float = Field(0.01, ge=0, description="Decoupled decay.")
    betas: tuple[float, float] = Field(
        (0.9, 0.999), description="AdamW's averages: the share of the past that each keeps, below 1."
    )
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    momentum: float = Field(
        0.95, ge=0, lt=1, description="Muon's average of the gradient: the share of the past that it keeps."
    )

    @field_validator("betas")
    @classmethod
    def _averages(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                "each is the share of the past that an average keeps, at least 0 and below 1; [0.9, 0.999] "
                "is usual"
            )
        return betas


class ActorConfig(Section):
    """Sets how the policy is updated."""

    ppo_mini_batch_size: int = Field(
        64,
        gt=0,
        description="Prompts per optimizer step (each with rollout.n samples); divides "
        "data.train_batch_size.",
    )
    ppo_epochs: int = Field(1, gt=0, description="Passes over the step's batch.")
    ppo_max_token_len_per_gpu: int = Field(
        16384,
        gt=0,
        description="Token budget of a micro-batch, prompt and response together, on one rank. Left out, "
        "`paceline train` chooses it on GPUs, with what is recomputed.",
    )
    shared_prompts: SharedPrompts = Field(
        "auto",
        description="Samples of a prompt in the same micro-batch have one copy of it, in all passes: the "
        "same numbers up to rounding, with less arithmetic. auto: in steps where that saves a sixth of it; "
        "the first such batch is computed both ways, and if they differ nothing is shared. on: in every "
        "step; a difference ends the run.",
    )
    memory: ActorMemory = Field(
        ActorMemoryConfig(),
        description="What the update keeps in memory, of policy and critic; auto leaves all of it to the "
        "memory plan.",
    )
    compile: bool | Literal["auto"] = Field(
        "auto",
        description="Compile the decoder layers of policy, critic and reference with torch.compile: "
        "elementwise operations are fused. auto: on GPUs without learner.context_parallel; where the "
        "compiler fails at the start, the learner says so and goes on without; true: then it ends. This "
        "takes half a minute for a 7B model, which the learner begins with as soon as it has loaded its "
        "weights, while engines start; its log says how long. Kernels are kept in TORCHINDUCTOR_CACHE_DIR, "
        "by default in the user's cache (PACELINE_CACHE_DIR), so that a learner that is started again has "
        "them. Old log-probs are then computed as the update computes them, with a graph that is dropped: "
        "the compiler rounds differently without one.",
    )
    attention_kernel: AttentionKernel = Field(
        "auto",
        description="What computes attention on a GPU in bfloat16. torch: its own, FlashAttention 2. "
        "flash_attention_4: the package flash-attn-4, for Hopper and Blackwell, which compiles its kernels "
        "in some seconds. auto: the latter where it is installed, runs here and computes what torch's does; "
        "the learner's log says why if not.",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="What gradients are summed over the ranks in, and over the micro-batches where "
        "memory.accumulate adds up whole ones. bfloat16 halves that traffic and memory, and rounds.",
    )
    policy_loss: PolicyLossConfig = Field(
        PPOClip(),
        description="Per-token loss: its type, which is enough by itself (`policy_loss: gspo`), and its "
        "own options.",
    )
    clip_ratio: float = Field(
        0.2,
        gt=0,
        description="Clip range of the ratio on both sides, for a policy loss that clips and sets no range "
        "of its own. For gspo, which clips the sequence's ratio, of the order of 3e-4; for geo_mean, which "
        "clips the log-ratio, 0.4 in the paper.",
    )
    clip_ratio_low: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Clip range below a ratio of 1; null: clip_ratio. 1: no bound below.",
    )
    clip_ratio_high: float | None = Field(None, gt=0, description="Clip range above; null: clip_ratio.")
    use_dual_clip: bool = Field(
        True, description="ppo_clip: also bound the ratio by clip_ratio_c where the advantage is negative."
    )
    clip_ratio_c: float = Field(3.0, gt=1, description="use_dual_clip: the bound on the ratio.")
    loss_agg_mode: Aggregation | None = Field(
        None,
        description="How per-token losses become one number, KL and entropy included; sums and means are "
        "over the mini-batch of all ranks together. null: the policy loss's own, which is "
        "seq-mean-token-mean for gspo, geo_mean and sapo, and token-mean for the others.",
    )
    loss_agg_constant: float | None = Field(
        None,
        gt=0,
        description="seq-mean-token-sum-norm: what a sequence's sum is divided by; null: "
        "data.max_response_length.",
    )
    entropy_coeff: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    positive_loss_coef: float = Field(
        0.0,
        ge=0,
        description="Weight of the positive-example loss (VAPO, arXiv:2504.05118, there 0.1): the mean "
        "negative log-prob of the tokens of right responses.",
    )
    positive_above: float = Field(
        0.0, description="positive_loss_coef: responses with a score above this are right."
    )
    load_balance_coef: float = Field(
        0.0,
        ge=0,
        description="Mixture of Experts: weight of the balance of the experts' load (actor/load_balance).",
    )
    use_kl_loss: bool = Field(False, description="Add a KL to the reference to the loss.")
    kl_loss_coef: float = Field(0.001, ge=0, description="use_kl_loss: weight of the KL.")
    kl_loss_type: KLKind = Field("k3", description=f"use_kl_loss: estimator of the KL. {KL_KINDS}")
    grad_clip: float = Field(1.0, gt=0, description="Largest global gradient norm.")
    ratio_audit_freq: int = Field(
        20,
        gt=0,
        description="How often the old log-probs of the first mini-batch are computed before the update and "
        "compared with those of its forward pass: in step 1 and after every so many steps; 1: in every step. "
        "In the other steps the forward pass gives them, unless something needs them earlier.",
    )
    optim: OptimConfig = OptimConfig()

    @property
    def aggregation(self) -> Aggregation:
        """The loss_agg_mode in force: the file's, or else the policy loss's own."""
        return self.loss_agg_mode or self.policy_loss.aggregation

    @property
    def compiles(self) -> bool:
        """Whether layers are compiled; not where nothing has chosen yet."""
        return self.compile is True

    @property
    def loss_arguments(self) -> dict[str, Any]:
        """The keyword arguments of the policy loss's function."""
        low, high = (
            self.clip_ratio if side is None else side for side in (self.clip_ratio_low, self.clip_ratio_high)
        )
        default = Clip(low=low, high=high, dual_clip_c=self.clip_ratio_c if self.use_dual_clip else None)
        return self.policy_loss.arguments(default)

    def require_experts(self, model: str, *, has_experts: bool) -> None:
        """Checks that the policy has what `load_balance_coef` weighs.

        Raises:
            ConfigError: it is set, and the model has no experts.
        """
        if self.load_balance_coef and not has_experts:
            raise ConfigError(
                f"actor.load_balance_coef={self.load_balance_coef:g} weighs the balance of experts' load; "
                f"{model} has no experts, so it would change nothing: leave it out"
            )

    @field_validator("clip_ratio")
    @classmethod
    def _both_sides(cls, clip_ratio: float) -> float:
        if clip_ratio > 1:
            raise ValueError(
                "1 - clip_ratio would be below 0, which no ratio reaches; set it to 1 at most, and a wider "
                "range above with clip_ratio_high"
            )
        return clip_ratio

    @model_validator(mode="after")
    def _constant_is_read(self) -> ActorConfig:
        if self.loss_agg_constant is not None and self.aggregation != "seq-mean-token-sum-norm":
            raise ValueError(
                f"loss_agg_constant={self.loss_agg_constant:g} is read by "
                f"loss_agg_mode=seq-mean-token-sum-norm alone, and {self.aggregation} is in force; set that "
                "mode, or leave the constant out"
            )
        return self

    @model_validator(mode="after")
    def _loss_is_usable(self) -> ActorConfig:
        _ = self.loss_arguments
        return self


class CriticConfig(Section):
    """The value update; used where the advantage estimator needs values."""

    path: str | None = Field(
        None,
        description="Folder to start the critic from: a critic, a reward model with one score (its score.* "
        "becomes the value head), or a language model; null: model.path (with a new value head).",
    )
    ppo_mini_batch_size: int | None = Field(
        None, gt=0, description="Prompts per optimizer step; null: the actor's."
    )
    ppo_epochs: int | None = Field(None, gt=0, description="Passes over the batch; null: the actor's.")
    vf_clip_param: float = Field(0.5, gt=0, description="Clip range of the value update.")
    warmup: int = Field(
        0,
        ge=0,
        description="Steps at the start in which only the critic learns (value pre-training); the policy "
        "and kl_ctrl's coefficient stay.",
    )
    warmup_lam: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Lambda of the critic's targets in the warm-up steps; 1 is the plain return. null: as in "
        "later steps (vapo: lam_critic, gae: lam).",
    )
    grad_clip: float = Field(1.0, gt=0, description="Largest global gradient norm.")
    optim: OptimConfig = OptimConfig(lr=1e-5)
