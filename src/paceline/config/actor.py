"""`actor.*` and `critic.*`: the updates."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.algorithm import KLKind
from paceline.config.base import Section

PolicyLossName = Literal["ppo_clip", "gspo", "cispo", "kl_cov", "clip_cov", "gpg", "sapo", "geo_mean"]

GSPO_CLIP_BOUND = 0.05
"""A larger range on a sequence's mean log-ratio is a token's range by mistake."""
GEO_MEAN_CLIP_BOUND = 0.01
"""A smaller range on a token's log-ratio is a sequence's range by mistake."""


class OptimConfig(Section):
    """AdamW and its schedule; one schedule step per training step."""

    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    lr_scheduler: Literal["constant", "cosine"] = Field("constant", description="Shape after the warm-up.")
    warmup_steps_ratio: float = Field(
        0.0, ge=0, lt=1, description="Share of trainer.total_steps over which the rate rises linearly from 0."
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="cosine: where it ends, as a share of lr.")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's decoupled decay.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's averages.")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon.")


class ActorConfig(Section):
    """The policy update."""

    strategy: Literal["fsdp2"] = Field(
        "fsdp2", description="How the model is sharded over the learner ranks."
    )
    ppo_mini_batch_size: int = Field(
        64,
        gt=0,
        description="Prompts per optimizer step (each with rollout.n samples); divides data.train_batch_size.",
    )
    ppo_epochs: int = Field(1, gt=0, description="Passes over the step's batch.")
    ppo_max_token_len_per_gpu: int = Field(
        16384, gt=0, description="Token budget of a micro-batch, prompt and response together, on one rank."
    )
    policy_loss: PolicyLossName = Field("ppo_clip", description="Per-token loss.")
    clip_ratio: float = Field(
        0.2,
        gt=0,
        description="Clip range of the ratio, both sides. gspo: of the sequence's ratio, of the order of 3e-4; geo_mean: of the log-ratio, 0.4 in the paper.",
    )
    clip_ratio_low: float | None = Field(
        None, gt=0, le=1, description="Lower side, where it differs; 1 leaves it open."
    )
    clip_ratio_high: float | None = Field(None, gt=0, description="Upper side, where it differs.")
    use_dual_clip: bool = Field(
        True, description="ppo_clip: bound the loss where the advantage is negative by clip_ratio_c."
    )
    clip_ratio_c: float = Field(3.0, gt=1, description="Dual clip's bound on the ratio.")
    cov_fraction: float = Field(
        2e-4,
        ge=0,
        le=1,
        description="kl_cov, clip_cov: share of a mini-batch's tokens, those of the highest covariance of log-prob and advantage, that are treated apart.",
    )
    cov_kl_coef: float = Field(1.0, ge=0, description="kl_cov: weight of the KL term on the selected tokens.")
    cov_low: float = Field(1.0, description="clip_cov: least covariance of a selected token.")
    cov_high: float = Field(5.0, description="clip_cov: highest covariance of a selected token.")
    tau_positive: float = Field(
        1.0, gt=0, description="sapo: how sharply the gate closes where the advantage is positive."
    )
    tau_negative: float = Field(1.05, gt=0, description="sapo: the same where it is not.")
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = Field(
        "token-mean",
        description="How per-token losses become one number; denominators are of the whole mini-batch over all ranks.",
    )
    loss_agg_constant: float | None = Field(
        None, gt=0, description="seq-mean-token-sum-norm: the constant; null: data.max_response_length."
    )
    entropy_coeff: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    use_kl_loss: bool = Field(False, description="Add a KL term to the loss.")
    kl_loss_coef: float = Field(0.001, ge=0, description="Its weight.")
    kl_loss_type: KLKind = Field("k3", description="Its estimator.")
    grad_clip: float = Field(1.0, gt=0, description="Largest global gradient norm.")
    optim: OptimConfig = OptimConfig()

    @property
    def clip_low(self) -> float:
        """The lower clip range in force."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """The upper clip range in force."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high

    @property
    def dual_clip_c(self) -> float | None:
        """The dual clip's bound in force; None without one."""
        return self.clip_ratio_c if self.use_dual_clip else None

    @model_validator(mode="after")
    def _bounds(self) -> ActorConfig:
        if self.policy_loss == "ppo_clip" and self.use_dual_clip and self.clip_ratio_c <= 1 + self.clip_high:
            raise ValueError(
                f"clip_ratio_c={self.clip_ratio_c} must exceed 1 + the upper clip range ({1 + self.clip_high})"
            )
        if self.policy_loss == "gspo" and max(self.clip_low, self.clip_high) > GSPO_CLIP_BOUND:
            raise ValueError(
                f"policy_loss=gspo clips the ratio of whole sequences, which hardly leaves 1: a range of {self.clip_low:g} and "
                f"{self.clip_high:g} clips nothing; set actor.clip_ratio_low=3e-4 and actor.clip_ratio_high=4e-4 (arXiv:2507.18071), "
                f"{GSPO_CLIP_BOUND} at most"
            )
        if self.policy_loss == "geo_mean" and min(self.clip_low, self.clip_high) < GEO_MEAN_CLIP_BOUND:
            raise ValueError(
                f"policy_loss=geo_mean clips each token's log-ratio: a range of {self.clip_low:g} and {self.clip_high:g} clips "
                f"nearly all of them; set actor.clip_ratio=0.4 (arXiv:2507.20673), {GEO_MEAN_CLIP_BOUND} at least"
            )
        if self.policy_loss == "clip_cov" and self.cov_low > self.cov_high:
            raise ValueError(
                f"cov_low={self.cov_low:g} must not exceed cov_high={self.cov_high:g}: no token would be selected"
            )
        return self


class CriticConfig(Section):
    """The value update; used where the advantage estimator needs values."""

    path: str | None = Field(
        None, description="Folder to start the critic from; null: model.path (with a new value head)."
    )
    ppo_mini_batch_size: int | None = Field(
        None, gt=0, description="Prompts per optimizer step; null: the actor's."
    )
    ppo_epochs: int | None = Field(None, gt=0, description="Passes over the batch; null: the actor's.")
    vf_clip_param: float = Field(0.5, gt=0, description="Clip range of the value update.")
    warmup: int = Field(
        0,
        ge=0,
        description="Steps at the start in which only the critic learns (value pre-training); the policy and kl_ctrl's coefficient stay.",
    )
    warmup_lam: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Lambda of the critic's targets in these steps, 1 being the plain return; null: as afterwards (vapo: lam_critic, gae: lam).",
    )
    grad_clip: float = Field(1.0, gt=0, description="Largest global gradient norm.")
    optim: OptimConfig = OptimConfig(lr=1e-5)
