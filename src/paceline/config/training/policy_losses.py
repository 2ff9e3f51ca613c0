"""`actor.policy_loss`: the options of each policy loss, by its `type`; the learner computes the losses."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from paceline.config.base import OwnOptions, Section, own_path

GSPO_CLIP_BOUND = 0.05
"""A larger clip range on a sequence's mean log-ratio was probably meant for a token's ratio."""
GEO_MEAN_CLIP_BOUND = 0.01
"""A smaller clip range on a token's log-ratio was probably meant for a sequence's ratio."""


Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""How per-token losses become one number; sums and means are over the mini-batch of all ranks together."""


class Clip(NamedTuple):
    """The clip range of the ratio below and above 1, and the dual clip's bound (None without one)."""

    low: float
    high: float
    dual_clip_c: float | None


class PolicyLossOptions(Section):
    """Base class of the options of all policy losses."""

    aggregation: ClassVar[Aggregation] = "token-mean"
    """How per-token losses become one number if actor.loss_agg_mode is not set."""

    @property
    def scalable_options(self) -> tuple[str, ...]:
        """The arguments that are clip ranges, which the guard may scale."""
        return ()

    def arguments(self, default: Clip) -> dict[str, Any]:
        """Returns the keyword arguments of the loss's function; `default` is the clip of `actor.*`.

        Raises:
            ValueError: the values do not make sense together.
        """
        return self.model_dump(exclude={"type"})


class ClippedLoss(PolicyLossOptions):
    """A loss with a clip range."""

    clip_ratio_low: float | None = Field(
        None, gt=0, le=1, description="Lower clip range; null: the actor's. 1: no lower bound."
    )
    clip_ratio_high: float | None = Field(None, gt=0, description="Upper clip range; null: the actor's.")

    @property
    def scalable_options(self) -> tuple[str, ...]:
        """Both ends of the range."""
        return "clip_low", "clip_high"

    def arguments(self, default: Clip) -> dict[str, Any]:
        """Returns the options with `clip_low` and `clip_high`."""
        own = self.model_dump(exclude={"type", "clip_ratio_low", "clip_ratio_high"})
        low = default.low if self.clip_ratio_low is None else self.clip_ratio_low
        high = default.high if self.clip_ratio_high is None else self.clip_ratio_high
        return {"clip_low": low, "clip_high": high, **own}


class CovarianceLoss(PolicyLossOptions):
    """A loss that treats the tokens with the highest covariance of log-prob and advantage differently."""

    cov_fraction: float = Field(
        2e-4, ge=0, le=1, description="Share of a mini-batch's tokens that are selected."
    )

    @property
    def covariance_band(self) -> tuple[float, float]:
        """The lowest and the highest covariance of a selected token."""
        return -math.inf, math.inf


class PPOClip(ClippedLoss):
    """PPO's clipped surrogate with a dual clip (arXiv:1707.06347, arXiv:1912.09729)."""

    type: Literal["ppo_clip"] = "ppo_clip"

    def arguments(self, default: Clip) -> dict[str, Any]:
        """Adds `dual_clip_c`, which only `actor.*` sets."""
        chosen = super().arguments(default) | {"dual_clip_c": default.dual_clip_c}
        bound = 1 + chosen["clip_high"]
        if default.dual_clip_c is not None and default.dual_clip_c <= bound:
            raise ValueError(
                f"clip_ratio_c={default.dual_clip_c} must exceed 1 + the upper clip range ({bound}); raise "
                "it, or set use_dual_clip=false"
            )
        return chosen


class GSPO(ClippedLoss):
    """PPO's clip on the ratio of whole sequences (arXiv:2507.18071); clip ranges are about 3e-4."""

    type: Literal["gspo"] = "gspo"
    aggregation = "seq-mean-token-mean"

    def arguments(self, default: Clip) -> dict[str, Any]:
        """Raises ValueError for a clip range that was meant for the ratio of tokens."""
        chosen = super().arguments(default)
        low, high = chosen["clip_low"], chosen["clip_high"]
        if max(low, high) > GSPO_CLIP_BOUND:
            raise ValueError(
                "policy_loss=gspo clips the ratio of whole sequences, which hardly leaves 1: a range of "
                f"{low:g} and "
                f"{high:g} clips nothing; set actor.clip_ratio_low=3e-4 and actor.clip_ratio_high=4e-4 "
                f"(arXiv:2507.18071), {GSPO_CLIP_BOUND} at most"
            )
        return chosen


class CISPO(ClippedLoss):
    """REINFORCE weighted by the clipped ratio, which has no gradient (arXiv:2506.13585)."""

    type: Literal["cispo"] = "cispo"


class GeoMean(ClippedLoss):
    """The geometric mean of a sequence's ratios (arXiv:2507.20673); it clips log-ratios, at 0.4 in the
    paper."""

    type: Literal["geo_mean"] = "geo_mean"
    aggregation = "seq-mean-token-mean"

    def arguments(self, default: Clip) -> dict[str, Any]:
        """Raises ValueError for a clip range that was meant for the ratio of sequences."""
        chosen = super().arguments(default)
        low, high = chosen["clip_low"], chosen["clip_high"]
        if min(low, high) < GEO_MEAN_CLIP_BOUND:
            raise ValueError(
                f"policy_loss=geo_mean clips each token's log-ratio: a range of {low:g} and {high:g} clips "
                "nearly all of them; set actor.clip_ratio=0.4 (arXiv:2507.20673), "
                f"{GEO_MEAN_CLIP_BOUND} at least"
            )
        return chosen


class KLCov(CovarianceLoss):
    """No clip; a KL term on the selected tokens (arXiv:2505.22617)."""

    type: Literal["kl_cov"] = "kl_cov"
    cov_kl_coef: float = Field(1.0, ge=0, description="Weight of the KL term on the selected tokens.")


class ClipCov(CovarianceLoss, ClippedLoss):
    """PPO's clip; the selected tokens have no loss (arXiv:2505.22617)."""

    type: Literal["clip_cov"] = "clip_cov"
    cov_low: float = Field(1.0, description="Lowest covariance of a selected token.")
    cov_high: float = Field(5.0, description="Highest covariance of a selected token.")

    @property
    def covariance_band(self) -> tuple[float, float]:
        """The lowest and the highest covariance of a token that may be selected."""
        return self.cov_low, self.cov_high

    @model_validator(mode="after")
    def _band(self) -> ClipCov:
        if self.cov_low > self.cov_high:
            raise ValueError(
                f"cov_low={self.cov_low:g} must not exceed cov_high={self.cov_high:g}: no token would be "
                "selected"
            )
        return self


class GPG(PolicyLossOptions):
    """Computes plain REINFORCE, without a ratio (arXiv:2504.02546)."""

    type: Literal["gpg"] = "gpg"


class SAPO(PolicyLossOptions):
    """A soft gate in place of the clip (arXiv:2511.20347)."""

    type: Literal["sapo"] = "sapo"
    aggregation = "seq-mean-token-mean"
    tau_positive: float = Field(
        1.0, gt=0, description="How sharply the gate closes where the advantage is positive."
    )
    tau_negative: float = Field(1.05, gt=0, description="How sharply it closes elsewhere.")


class Distill(PolicyLossOptions):
    """A divergence from a served teacher over its likeliest tokens (arXiv:2306.13649); reads no reward.

    Needs algorithm.teacher.
    """

    type: Literal["distill"] = "distill"
    kl: Literal["reverse", "forward", "jsd"] = Field(
        "reverse",
        description="reverse: KL(policy || teacher). forward: KL(teacher || policy). jsd: a mixture of both "
        "against their mean.",
    )
    beta: float = Field(
        0.5, gt=0, lt=1, description="jsd: the teacher's share of the mean, and weight of its KL."
    )


class CustomLoss(PolicyLossOptions):
    """A function of your own, `f(inputs: LossInputs, **options) -> LossOutputs`: docs/add-an-algorithm.md."""

    type: Literal["custom"] = "custom"
    path: Annotated[str, AfterValidator(own_path)] = Field(
        description="path/to/file.py:function or module:function, as the learner's processes find it."
    )
    options: OwnOptions = Field({}, description="Keyword arguments of every call.")
    scalable: tuple[str, ...] = Field(
        (), description="Options that are clip ranges, which the guard's lower_clip may scale."
    )

    @model_validator(mode="after")
    def _scales_its_options(self) -> CustomLoss:
        for name in self.scalable:
            value = self.options.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"scalable names {name!r}, and options has no number of that name; add it")
        return self

    @property
    def scalable_options(self) -> tuple[str, ...]:
        """The options, named in `scalable`, that the guard may scale."""
        return self.scalable

    def arguments(self, default: Clip) -> dict[str, Any]:
        """Returns the configured `options`, unchanged."""
        return dict(self.options)


PolicyLossConfig = Annotated[
    PPOClip | GSPO | CISPO | GeoMean | KLCov | ClipCov | GPG | SAPO | Distill | CustomLoss,
    Field(discriminator="type"),
    BeforeValidator(lambda value: {"type": value} if isinstance(value, str) else value),
]
