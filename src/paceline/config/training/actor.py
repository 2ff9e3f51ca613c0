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
    type: Literal["adamw", "adamw_8bit", "muon"] = Field(
        "adamw",
        description="adamw: AdamW. adamw_8bit: AdamW whose averages of matrices have 8 bits per number, with "
        "a scale per 256 numbers: 2 bytes per parameter instead of 8; its steps differ slightly from those "
        "of adamw. muon: Muon for the layers' matrices, and AdamW for embeddings, the head, vectors, and "
        "experts that are stored together. Muon keeps one average instead of two; its steps are as long as "
        "AdamW's at the same lr.",
    )
    lr_scheduler: Literal["constant", "linear", "cosine", "cosine_with_restarts"] = Field(
        "constant", description="Shape after the warm-up, over the rest of trainer.total_steps."
    )
    lr_cycles: int = Field(
        1, gt=0, description="cosine_with_restarts: number of cycles; in each, the rate falls from lr."
    )
    warmup_steps_ratio: float = Field(
        0.0, ge=0, lt=1, description="Share of trainer.total_steps over which the rate rises linearly from 0."
    )
    min_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="Final learning rate of a schedule that falls, as a share of lr."
    )
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")
    betas: tuple[float, float] = Field(
        (0.9, 0.999), description="Decay rates of AdamW's two moving averages, below 1."
    )
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    momentum: float = Field(
        0.95, ge=0, lt=1, description="Decay rate of Muon's moving average of the gradient."
    )

    @field_validator("betas")
    @classmethod
    def _averages(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                "each is the decay rate of a moving average, at least 0 and below 1; [0.9, 0.999] is usual"
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
        description="Token budget of a micro-batch on one rank, prompt and response together. If it is left "
        "out, `paceline train` chooses it on GPUs, together with what is recomputed.",
    )
    shared_prompts: SharedPrompts = Field(
        "auto",
        description="Samples of a prompt in the same micro-batch share one copy of the prompt, in all "
        "passes: this gives the same numbers up to rounding, with less arithmetic. auto: in steps where it "
        "saves a sixth of the arithmetic; the first such batch is computed both ways, and if the results "
        "differ, nothing is shared. on: in every step; if the results differ, the run ends.",
    )
    memory: ActorMemory = Field(
        ActorMemoryConfig(),
        description="What the updates of policy and critic keep in memory; auto: the memory plan chooses.",
    )
    compile: bool | Literal["auto"] = Field(
        "auto",
        description="Compile the decoder layers of policy, critic and reference with torch.compile: "
        "elementwise operations are fused. auto: on GPUs; if the compiler fails at the start, the learner "
        "says so and goes on without it. true: if the compiler fails, the run ends. Divided experts and "
        "matrices are not compiled themselves. Compiling takes half a minute for a 7B model and runs while "
        "the engines start; the learner's log says how long it took. Kernels are kept in "
        "TORCHINDUCTOR_CACHE_DIR, by default in the user's cache (PACELINE_CACHE_DIR), so that a restarted "
        "learner can use them again. With compiled layers, old log-probs are computed with an autograd "
        "graph, which is then dropped, as in the update: without a graph, the compiler rounds differently.",
    )
    attention_kernel: AttentionKernel = Field(
        "auto",
        description="What computes attention on a GPU in bfloat16. torch: torch's FlashAttention 2. "
        "flash_attention_4: the package flash-attn-4, for Hopper and Blackwell, which compiles its kernels "
        "in some seconds. auto: flash_attention_4 if it is installed, runs on this GPU and agrees with "
        "torch's results, else torch; the learner's log says why.",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Type in which gradients are summed over the ranks and, with memory.accumulate, over the "
        "micro-batches. bfloat16 halves that traffic and memory, but rounds.",
    )
    policy_loss: PolicyLossConfig = Field(
        PPOClip(),
        description="Per-token loss: its type and its options; the type is enough (`policy_loss: gspo`).",
    )
    clip_ratio: float = Field(
        0.2,
        gt=0,
        description="Clip range of the ratio on both sides, for a policy loss that clips and sets no range "
        "of its own. gspo clips the sequence's ratio and needs a range of about 3e-4; geo_mean clips the "
        "log-ratio, and its paper uses 0.4.",
    )
    clip_ratio_low: float | None = Field(
        None, gt=0, le=1, description="Clip range below a ratio of 1; null: clip_ratio. 1: no bound below."
    )
    clip_ratio_high: float | None = Field(
        None, gt=0, description="Clip range above a ratio of 1; null: clip_ratio."
    )
    use_dual_clip: bool = Field(
        True, description="ppo_clip: also bound the ratio by clip_ratio_c where the advantage is negative."
    )
    clip_ratio_c: float = Field(3.0, gt=1, description="use_dual_clip: the bound on the ratio.")
    loss_agg_mode: Aggregation | None = Field(
        None,
        description="How per-token losses, also those of KL and entropy, become one number; sums and means "
        "are over the mini-batch of all ranks together. null: the policy loss's default, which is "
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
        description="Weight of the positive-example loss, which is the mean negative log-prob of the tokens "
        "of right responses (VAPO, arXiv:2504.05118, which uses 0.1).",
    )
    positive_above: float = Field(
        0.0, description="positive_loss_coef: responses with a score above this are right."
    )
    load_balance_coef: float = Field(
        0.0, ge=0, description="Mixture of Experts: weight of the load-balancing loss (actor/load_balance)."
    )
    router_bias_update_rate: float = Field(
        0.0,
        ge=0,
        description="Mixture of Experts whose routers have a correction of scores: after an optimizer step, "
        "the correction of an expert rises by this if fewer tokens than the layer's mean chose the expert, "
        "and falls by it if more did (arXiv:2408.15664; DeepSeek-V3 took 0.001). 0: corrections stay.",
    )
    router_replay: bool = Field(
        False,
        description="Mixture of Experts: policy and reference send each token to the experts that the engine "
        "chose for it (R3, arXiv:2510.11370); their weights are still the learner's. docs/models.md.",
    )
    use_kl_loss: bool = Field(False, description="Add a KL to the reference to the loss.")
    kl_loss_coef: float = Field(0.001, ge=0, description="use_kl_loss: weight of the KL.")
    kl_loss_type: KLKind = Field("k3", description=f"use_kl_loss: estimator of the KL. {KL_KINDS}")
    grad_clip: float = Field(1.0, gt=0, description="Largest global gradient norm.")
    ratio_audit_freq: int = Field(
        20,
        gt=0,
        description="Steps between audits, the first in step 1. An audit computes the old log-probs of the "
        "first mini-batch before the update and compares them with those of the update's forward pass; 1: in "
        "every step. In other steps the old log-probs come from the forward pass, unless something needs "
        "them earlier.",
    )
    optim: OptimConfig = OptimConfig()

    @property
    def aggregation(self) -> Aggregation:
        """The loss_agg_mode in force: the configured one, or else the policy loss's default."""
        return self.loss_agg_mode or self.policy_loss.aggregation

    @property
    def compiles(self) -> bool:
        """Whether layers are compiled; False while the choice is still open."""
        return self.compile is True

    @property
    def loss_arguments(self) -> dict[str, Any]:
        """The keyword arguments of the policy loss's function."""
        low, high = (
            self.clip_ratio if side is None else side for side in (self.clip_ratio_low, self.clip_ratio_high)
        )
        default = Clip(low=low, high=high, dual_clip_c=self.clip_ratio_c if self.use_dual_clip else None)
        return self.policy_loss.arguments(default)

    def require_experts(self, model: str, *, has_experts: bool, corrects_scores: bool) -> None:
        """Checks that the policy has what settings for experts are about.

        Args:
            corrects_scores: whether its routers have corrections of scores.

        Raises:
            ConfigError: one is set, but the model has no experts, or no corrections.
        """
        if self.router_bias_update_rate and not corrects_scores:
            raise ConfigError(
                f"actor.router_bias_update_rate={self.router_bias_update_rate:g} moves the corrections of "
                f"routers' scores, and {model} has none: leave it out, or set actor.load_balance_coef"
            )
        if self.router_replay and not has_experts:
            raise ConfigError(
                f"actor.router_replay repeats the engine's choices of experts; {model} has no experts: "
                "leave it out"
            )
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
                f"loss_agg_constant={self.loss_agg_constant:g} is read only "
                f"by loss_agg_mode=seq-mean-token-sum-norm, and {self.aggregation} is in force; set that "
                "mode, or leave the constant out"
            )
        return self

    @model_validator(mode="after")
    def _loss_is_usable(self) -> ActorConfig:
        _ = self.loss_arguments
        return self


class CriticConfig(Section):
    """The value update, which is used if the advantage estimator needs values."""

    path: str | None = Field(
        None,
        description="Folder of the model from which the critic starts: a critic, a reward model with one "
        "score (its score.* becomes the value head), or a language model. null: model.path, with a new value "
        "head.",
    )
    ppo_mini_batch_size: int | None = Field(
        None, gt=0, description="Prompts per optimizer step; null: the actor's."
    )
    ppo_epochs: int | None = Field(None, gt=0, description="Passes over the batch; null: the actor's.")
    vf_clip_param: float = Field(0.5, gt=0, description="Clip range of the value update.")
    warmup: int = Field(
        0,
        ge=0,
        description="Steps at the start in which only the critic learns (value pre-training); the policy and "
        "kl_ctrl's coefficient do not change.",
    )
    warmup_lam: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Lambda of the critic's targets in the warm-up steps; with 1 the target is the plain "
        "return. null: as in later steps (vapo: lam_critic, gae: lam).",
    )
    grad_clip: float = Field(1.0, gt=0, description="Largest global gradient norm.")
    optim: OptimConfig = OptimConfig(lr=1e-5)
