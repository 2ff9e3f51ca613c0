"""`guard.*`: bounds on what a healthy run's numbers do, and what happens beyond them."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.core.guard import RULES, Action, RuleLimits


class RuleConfig(Section):
    """A rule: a bound for each action, null for an action that it does not take."""

    enabled: bool = Field(True, description="Whether the rule is looked at.")
    warn: float | None = Field(None, ge=0, description="Journal, notice to watchers, report.")
    skip: float | None = Field(
        None,
        ge=0,
        description="Skip the optimizer step; a rule over the whole batch skips all steps of the batch.",
    )
    lower_clip: float | None = Field(
        None,
        ge=0,
        description="Multiply the policy loss's clip range by guard.clip_factor, from the next step on.",
    )
    raise_kl_coef: float | None = Field(
        None, ge=0, description="Divide the KL coefficient by guard.kl_factor, from the next step on."
    )
    lower_kl_coef: float | None = Field(
        None, ge=0, description="Multiply the KL coefficient by guard.kl_factor, from the next step on."
    )
    fixed_kl: float | None = Field(
        None, ge=0, description="Leave adaptive KL control: guard.fixed_kl_coef from the next step on."
    )
    lower_lr: float | None = Field(
        None, ge=0, description="Multiply the learning rates by guard.lr_factor, from the next step on."
    )
    rollback: float | None = Field(
        None,
        ge=0,
        description="Go back to the weights of the last good checkpoint, with a lower learning rate.",
    )
    stop: float | None = Field(
        None, ge=0, description="End the run with an error; these weights are not published."
    )
    patience: int = Field(
        1,
        gt=0,
        description="Steps in a row beyond the bound, for val_fall validations in a row, before an action "
        "other than warn and skip is taken.",
    )

    @property
    def limits(self) -> RuleLimits:
        """The bounds in force, by action; none where the rule is off."""
        bounds = {action: getattr(self, action.value) for action in Action}
        return RuleLimits(bounds={a: b for a, b in bounds.items() if b is not None}, patience=self.patience)


def _rule(description: str, **bounds: float | int) -> Any:
    return Field(RuleConfig.model_validate(bounds), description=description)


class GuardConfig(Section):
    """Rules that watch a run: beyond its bound `guard.RULE.ACTION` a rule acts; see docs/guard-rails.md."""

    enabled: bool = Field(
        True, description="false: no rule is looked at. Steps that are not finite are skipped all the same."
    )
    window: int = Field(100, gt=1, description="Values that a running median is taken of.")
    min_history: int = Field(
        10, gt=0, description="Values before a rule that measures by its running median begins to judge."
    )
    lr_factor: float = Field(
        0.5, gt=0, lt=1, description="What lower_lr and rollback multiply the learning rates by."
    )
    kl_factor: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="What lower_kl_coef multiplies, and raise_kl_coef divides, the KL coefficient by.",
    )
    clip_factor: float = Field(
        0.5, gt=0, lt=1, description="What lower_clip multiplies the policy loss's clip range by."
    )
    max_kl_scale: float = Field(
        16.0, ge=1, description="Largest multiple of the configured KL coefficient that it is raised to."
    )
    min_scale: float = Field(
        0.01,
        gt=0,
        le=1,
        description="Smallest share of the configured rate, coefficient or clip range that they are lowered "
        "to.",
    )
    fixed_kl_coef: float | None = Field(
        None, ge=0, description="What fixed_kl falls back to; null: algorithm.kl_ctrl.kl_coef."
    )
    max_rollbacks: int = Field(3, ge=0, description="Rollbacks in one run; one more stops it.")
    ppo_kl: RuleConfig = _rule(
        "Size of the KL from the policy before the step to the one being updated, of a mini-batch.",
        warn=0.03,
        skip=0.05,
    )
    reference_kl: RuleConfig = _rule(
        "Size of the KL to the reference model, mean over the step's sequences.", warn=1.0
    )
    grad_norm: RuleConfig = _rule(
        "Gradient norm of a mini-batch that exceeds grad_clip, in multiples of its running median; "
        "actor and critic each.",
        warn=10.0,
        skip=100.0,
    )
    pg_clipfrac: RuleConfig = _rule(
        "Share of tokens that the policy's clip bounds, of a mini-batch.", warn=0.3
    )
    pg_clipfrac_lower: RuleConfig = _rule(
        "Share of tokens that the dual clip bounds, of a mini-batch.", warn=0.05
    )
    vf_clipfrac: RuleConfig = _rule("Share of tokens that the value clip bounds, of a mini-batch.", warn=0.05)
    entropy_low: RuleConfig = _rule(
        "Entropy of a mini-batch in nats per token; fires at or below its bounds."
    )
    entropy_high: RuleConfig = _rule("Entropy of a mini-batch, in multiples of its running median.", warn=3.0)
    reward_constant: RuleConfig = _rule(
        "Standard deviation of the step's rewards; fires at or below its bounds.", warn=0.0
    )
    reward_jump: RuleConfig = _rule(
        "Standard deviation of the step's rewards, in multiples of its running median.",
        warn=100.0,
        skip=1000.0,
    )
    groups_without_spread: RuleConfig = _rule(
        "Share of the step's prompt groups whose rewards are all equal: they teach nothing."
    )
    component_constant: RuleConfig = _rule(
        "Steps in a row in which a scorer gave all responses the same value, at most guard.window: it tells "
        "nothing apart.",
        warn=20.0,
    )
    reward_errors: RuleConfig = _rule(
        "Share of the step's prompt groups that were dropped because a sample has no reward, or of the "
        "responses that a scorer with required: false could not score; the larger one.",
        warn=0.1,
    )
    out_of_memory: RuleConfig = _rule(
        "Optimizer steps of a step that ran out of GPU memory and were taken again in halved micro-batches."
    )
    non_finite: RuleConfig = _rule(
        "Number of losses, gradients and metrics of the step that are NaN or infinite; "
        "such an optimizer step is never taken.",
        warn=0.0,
        stop=0.0,
        patience=10,
    )
    mismatch_kl: RuleConfig = _rule(
        "KL between rollout and learner on the step's tokens (rollout/mismatch_kl), in multiples of what "
        "model.dtype allows: 1e-6 for float32, 0.01 for bfloat16.",
        warn=1.0,
        stop=10.0,
    )
    throughput: RuleConfig = _rule(
        "Tokens per second of generating, scoring and learning, as a share of its running median; "
        "fires at or below its bounds.",
        warn=0.25,
    )
    val_fall: RuleConfig = _rule(
        "How far the interval of a validation's mean reward lies below that of the best validation so far, "
        "in units of the reward; each set of held-out prompts by itself. 0: the two intervals touch.",
        warn=0.0,
    )

    @property
    def limits(self) -> dict[str, RuleLimits]:
        """The limits of every enabled rule, by its name."""
        rules = {name: getattr(self, name) for name in RULES} if self.enabled else {}
        return {name: rule.limits for name, rule in rules.items() if rule.enabled}

    @property
    def refuses_by_reference_kl(self) -> bool:
        """Whether the KL to the reference may keep a batch from being trained on."""
        limits = self.limits.get("reference_kl")
        return limits is not None and Action.SKIP in limits.bounds

    def uses(self, action: Action) -> bool:
        """Returns whether any rule in force may take the action."""
        return any(action in limits.bounds for limits in self.limits.values())

    @model_validator(mode="before")
    @classmethod
    def _over_the_defaults(cls, tree: Any) -> Any:
        """A rule's given keys replace its defaults; `false` (in YAML also `off`) disables a rule, or all."""
        if isinstance(tree, bool):
            return {"enabled": tree}
        if not isinstance(tree, dict):
            return tree
        merged = dict(tree)
        for name in RULES:
            given = tree.get(name)
            if isinstance(given, bool):
                given = {"enabled": given}
            if isinstance(given, int | float | str):
                raise ValueError(
                    f"guard.{name}={given}: which action? Write guard.{name}.warn={given}, say, "
                    f"or guard.{name}=off"
                )
            if isinstance(given, dict):
                merged[name] = {**cls.model_fields[name].default.model_dump(), **given}
        return merged

    @model_validator(mode="after")
    def _possible(self) -> GuardConfig:
        for name, rule in RULES.items():
            for action in Action:
                if action not in rule.actions and getattr(getattr(self, name), action.value) is not None:
                    allowed = ", ".join(allowed.value for allowed in rule.actions)
                    raise ValueError(f"guard.{name} cannot {action.value}; its actions are {allowed}")
        return self
