"""`algorithm.overlong`, `.resample`, `.replay` and `.rollout_correction`: scores, batch and loss."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.base import Section


class OverlongConfig(Section):
    """DAPO's penalty on responses that come close to the length limit."""

    enable: bool = Field(
        False, description="Add the penalty to the scores before the advantages are computed."
    )
    buffer_length: int = Field(
        128,
        gt=0,
        description="Tokens before data.max_response_length over which the penalty grows from 0 to factor.",
    )
    factor: float = Field(1.0, ge=0, description="The penalty at data.max_response_length.")


class ResampleConfig(Section):
    """PF-PPO: once advantages are computed, the update's batch is drawn with replacement from the step's
    batch."""

    method: Literal["none", "pow", "max_min"] = Field(
        "none",
        description="pow: with probability proportional to |score|^power; max_min: evenly from each "
        "group's best and worst.",
    )
    power: float = Field(2.0, ge=0, description="pow: the exponent; 0 draws evenly.")


class ReplayConfig(Section):
    """A buffer of prompt groups that earlier steps trained, some of which each step trains again."""

    prompts_per_step: int = Field(
        0,
        ge=0,
        description="Prompt groups that a step trains again, besides its own; 0: no replay. The draw depends "
        "only on trainer.seed and the step. Needs barrier.mode: bounded; "
        "docs/decisions/0038-permissions-to-train-again.md.",
    )
    size: int = Field(10000, gt=0, description="Most trajectories in the buffer; the oldest leave first.")
    filter_probability: float = Field(
        0.8, gt=0, le=1, description="Probability that a prompt group enters the buffer."
    )
    max_age: int = Field(
        4,
        gt=0,
        description="How many versions older the weights that sampled a token may be than the weights that "
        "train it again; what is older leaves the buffer.",
    )


class RolloutCorrectionConfig(Section):
    """Importance weights on the policy loss; w is the learner's probability of a token over the sampler's."""

    method: Literal["none", "tis", "icepop", "sequence_mask"] | None = Field(
        None,
        description="The weight. tis: min(w, cap); icepop: w if w is in [low, high], else 0; sequence_mask: "
        "1 for sequences whose w is in [low, high], else 0. null: sequence_mask for samples of older weights "
        "(barrier.max_staleness above 0, algorithm.replay), else none.",
    )
    level: Literal["token", "sequence", "geometric"] | None = Field(
        None,
        description="token: w of the token; sequence: product of w over its sequence; geometric: geometric "
        "mean of w over its sequence. null: sequence for sequence_mask, else token.",
    )
    cap: float = Field(2.0, gt=0, description="tis: largest weight.")
    low: float = Field(0.5, ge=0, description="icepop, sequence_mask: least weight that is kept.")
    high: float = Field(5.0, gt=0, description="icepop, sequence_mask: largest weight that is kept.")

    @property
    def weight_level(self) -> Literal["token", "sequence", "geometric"]:
        """Whether weights are per token or per sequence."""
        return self.level or ("sequence" if self.method == "sequence_mask" else "token")

    @model_validator(mode="after")
    def _bounds(self) -> RolloutCorrectionConfig:
        if self.low >= self.high:
            raise ValueError(f"low={self.low:g} must be below high={self.high:g}")
        if self.method == "icepop" and self.weight_level != "token":
            raise ValueError(
                f"method=icepop works token by token, level={self.level} is not for it; leave level out, "
                "or set method=sequence_mask"
            )
        return self
