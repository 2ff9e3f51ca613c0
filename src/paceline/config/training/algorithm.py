"""`algorithm.*`: advantages and the KL penalty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from paceline.config.base import OneOf, OwnOptions, Section, own_path
from paceline.config.training.shaping import (
    OverlongConfig,
    ReplayConfig,
    ResampleConfig,
    RolloutCorrectionConfig,
)
from paceline.config.training.teacher import TeacherConfig
from paceline.core.estimators import ADV_ESTIMATORS, EstimatorTraits, Need

KLKind = Literal[
    "k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+",
    "kl", "mse", "low_var_kl", "kl+", "mse+", "low_var_kl+",
]  # fmt: skip

KL_KINDS = (
    "With d the difference of the log-probs: k1 (alias kl) d, abs |d|, k2 (mse) d²/2, k3 (low_var_kl) "
    "exp(-d) + d - 1. A + keeps the value and takes the gradient of k2."
)
"""What the names of KLKind mean."""


class KLControlConfig(Section):
    """How the coefficient of the KL penalty in the reward moves."""

    type: Literal["fixed", "adaptive"] = Field(
        "fixed",
        description="fixed: the coefficient stays. adaptive: it moves so that the KL approaches target_kl.",
    )
    kl_coef: float = Field(0.001, ge=0, description="The coefficient; adaptive: its initial value.")
    target_kl: float = Field(0.1, gt=0, description="adaptive: the target of the KL per token.")
    horizon: int = Field(
        10000,
        gt=0,
        description="adaptive: number of sequences over which the coefficient changes by at most a fifth; a "
        "larger number makes it slower.",
    )


class DynamicSamplingConfig(Section):
    """DAPO's dynamic sampling: within a step, other prompts replace groups whose scores are all equal."""

    enable: bool = Field(
        False, description="Replace groups that teach nothing; rollout.n must be at least 2."
    )
    max_extra_factor: float = Field(
        2.0,
        gt=0,
        description="Most prompts drawn in a step beyond data.train_batch_size, as a multiple of it; once "
        "these are used up, the step goes on with the groups that it has.",
    )
    metric: str | None = Field(
        None,
        description="The reward component (a scorer's name, or name/key) whose values are compared; null: "
        "the reward.",
    )


REFERENCE = "reference"
"""Name of the reference model's log-probs."""
_TAKEN = ("rollout", "old", REFERENCE)


class FrozenNetworkConfig(Section):
    """A network that scores the samples and is never updated."""

    path: str = Field(description="Folder of the model, as model.path.")


def _path_alone(value: object) -> object:
    """Reads `teacher: FOLDER` as `teacher: {path: FOLDER}`."""
    return value if isinstance(value, dict | FrozenNetworkConfig) else {"path": value}


class AlgorithmConfig(Section):
    """Sets how rewards become advantages."""

    type: Literal["built_in", "custom"] = Field(
        "built_in", description="custom: the class that `path` names; docs/add-an-algorithm.md."
    )
    path: Annotated[str, AfterValidator(own_path)] | None = Field(
        None, description="custom: path/to/file.py:Class or module:Class, as the learner's processes find it."
    )
    options: OwnOptions = Field({}, description="Keyword arguments of an estimator or algorithm of your own.")
    needs: tuple[Need, ...] = Field(
        (),
        description="What an estimator or algorithm of your own needs: critic, greedy (the score of "
        "a greedy answer to each prompt), group (rollout.n of 2 or more).",
    )
    networks: dict[str, Annotated[FrozenNetworkConfig, BeforeValidator(_path_alone)]] = Field(
        {},
        description="Frozen networks besides the reference: {teacher: FOLDER}, or {teacher: {path: FOLDER}}. "
        "An estimator, algorithm or loss of your own reads their log-probs by name. FOLDER is written as in "
        "model.path; the model may have any shape, but needs the policy's tokenizer and a vocabulary that is "
        "at least as large.",
    )
    teacher: TeacherConfig | None = Field(
        None,
        description="A served teacher, for actor.policy_loss: distill or a loss of your own "
        "(docs/distillation.md). null: none.",
    )
    adv_estimator: Annotated[str, OneOf(tuple(ADV_ESTIMATORS), or_own=True)] = Field(
        "grpo",
        description="Name of the estimator; only gae and vapo need a critic. Or a function of your own: "
        "path/to/file.py:function.",
    )
    gamma: float = Field(1.0, gt=0, le=1, description="Discount per token.")
    lam: float = Field(1.0, ge=0, le=1, description="gae: lambda.")
    lam_policy: float | None = Field(
        None, ge=0, le=1, description="vapo: the policy's lambda; null: 1 - 1 / (alpha x response length)."
    )
    lam_critic: float = Field(1.0, ge=0, le=1, description="vapo: lambda of the critic's targets.")
    alpha: float = Field(0.05, gt=0, description="vapo: alpha of the length-adaptive lambda.")
    norm_adv_by_std_in_grpo: bool = Field(
        True, description="grpo: divide the advantages by the group's standard deviation."
    )
    use_kl_in_reward: bool = Field(
        False,
        description="Subtract kl_ctrl's coefficient times the KL to the reference from each token's reward.",
    )
    kl_penalty: KLKind = Field(
        "k1", description="use_kl_in_reward: estimator of the KL; same names as kl_loss_type."
    )
    kl_ctrl: KLControlConfig = KLControlConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    overlong: OverlongConfig = OverlongConfig()
    resample: ResampleConfig = ResampleConfig()
    replay: ReplayConfig = ReplayConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()

    @model_validator(mode="after")
    def _is_own_or_not(self) -> AlgorithmConfig:
        if (self.type == "custom") != (self.path is not None):
            raise ValueError("type: custom and path: path/to/file.py:Class belong together; write both")
        if not self.is_own and (self.options or self.needs):
            raise ValueError(
                f"options and needs are for an estimator or algorithm of your own, and "
                f"{self.adv_estimator} is built in; leave them out"
            )
        return self

    @model_validator(mode="after")
    def _networks_have_names_of_their_own(self) -> AlgorithmConfig:
        if refused := [name for name in self.networks if name in _TAKEN or not name.isidentifier()]:
            raise ValueError(
                f"networks: {refused[0]!r} cannot name a network: use letters, digits and _, and none of "
                f"{', '.join(_TAKEN)}, which are the names of sampler, policy and reference model"
            )
        return self

    @model_validator(mode="after")
    def _steers_something(self) -> AlgorithmConfig:
        if self.kl_ctrl.type == "adaptive" and not self.use_kl_in_reward:
            raise ValueError(
                "kl_ctrl.type=adaptive steers the coefficient of a KL in the reward, and this run has none; "
                "set use_kl_in_reward: true, or leave kl_ctrl out"
            )
        return self

    def with_places(self, place: Callable[[str], str]) -> AlgorithmConfig:
        """Returns a copy in which `place(path)`, such as the folder of a local copy, replaces each network's
        path."""
        networks = {
            name: network.model_copy(update={"path": place(network.path)})
            for name, network in self.networks.items()
        }
        return self.model_copy(update={"networks": networks})

    @property
    def is_own(self) -> bool:
        """Whether the user's own estimator or algorithm computes the advantages."""
        return self.path is not None or ":" in self.adv_estimator

    @property
    def name(self) -> str:
        """Name of what computes the advantages, for messages."""
        return self.path or self.adv_estimator

    @property
    def estimator(self) -> EstimatorTraits:
        """The options and needs of what computes the advantages."""
        return EstimatorTraits(needs=self.needs) if self.is_own else ADV_ESTIMATORS[self.adv_estimator]

    @property
    def estimator_arguments(self) -> dict[str, Any]:
        """The keyword arguments of adv_estimator's function."""
        available = {**dict(self), "normalize_by_std": self.norm_adv_by_std_in_grpo}
        return {name: available[name] for name in self.estimator.options}
