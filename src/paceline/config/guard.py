"""`guard.*`: bounds on a run's metrics, and the actions that are taken beyond them."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.core.guard import RULES, Action, RuleLimits


class RuleConfig(Section):
    """A rule: a bound for each action; null if the rule does not take the action."""

    enabled: bool = Field(True, description="false: the rule is not evaluated.")
    warn: float | None = Field(
        None, ge=0, description="Write a warning to the journal and the report, and tell watchers."
    )
    skip: float | None = Field(
        None,
        ge=0,
        description="Skip the optimizer step; a rule that looks at the whole batch skips all of its "
        "optimizer steps.",
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
        None,
        ge=0,
        description="Replace adaptive KL control by the constant guard.fixed_kl_coef, from the next step on.",
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
        None, ge=0, description="End the run with an error, without publishing the new weights."
    )
    patience: int = Field(
        1,
        gt=0,
        description="Number of consecutive steps (for val_fall: validations) beyond the bound before any "
        "action but warn and skip is taken.",
    )

    @property
    def limits(self) -> RuleLimits:
        """The rule's bounds, by action, and its patience."""
        bounds = {action: getattr(self, action.value) for action in Action}
        return RuleLimits(bounds={a: b for a, b in bounds.items() if b is not None}, patience=self.patience)


def _rule(description: str, **bounds: float | int) -> Any:
    return Field(RuleConfig.model_validate(bounds), description=description)


class GuardConfig(Section):
    """Rules that watch a run: a rule takes an action beyond the bound `guard.RULE.ACTION`; see
    docs/guard-rails.md."""

    enabled: bool = Field(
        True,
        description="false: no rule is evaluated. Optimizer steps with NaN or infinite values are skipped "
        "even then.",
    )
    window: int = Field(
        100, gt=1, description="Number of latest values from which a running median is computed."
    )
    min_history: int = Field(
        10,
        gt=0,
        description="Number of values that a rule with a running median needs before it takes effect.",
    )
    lr_factor: float = Field(
        0.5, gt=0, lt=1, description="Factor by which lower_lr and rollback multiply the learning rates."
    )
    kl_factor: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="Factor by which lower_kl_coef multiplies the KL coefficient, and by which raise_kl_coef "
        "divides it.",
    )
    clip_factor: float = Field(
        0.5, gt=0, lt=1, description="Factor by which lower_clip multiplies the policy loss's clip range."
    )
    max_kl_scale: float = Field(
        16.0, ge=1, description="Upper limit of the KL coefficient, as a multiple of the configured one."
    )
    min_scale: float = Field(
        0.01,
        gt=0,
        le=1,
        description="Lower limit of learning rates, KL coefficient and clip range, as a share of the "
        "configured values.",
    )
    fixed_kl_coef: float | None = Field(
        None,
        ge=0,
        description="The constant KL coefficient that fixed_kl sets; null: algorithm.kl_ctrl.kl_coef.",
    )
    max_rollbacks: int = Field(3, ge=0, description="Most rollbacks in one run; one more ends the run.")
    ppo_kl: RuleConfig = _rule(
        "Absolute KL of a mini-batch, from the policy before the step to the one that is being updated.",
        warn=0.03,
        skip=0.05,
    )
    reference_kl: RuleConfig = _rule(
        "Absolute KL to the reference model, as the mean over the step's sequences.", warn=1.0
    )
    grad_norm: RuleConfig = _rule(
        "Gradient norm of a mini-batch in multiples of its running median, if it exceeds grad_clip; for "
        "actor and critic separately.",
        warn=10.0,
        skip=100.0,
    )
    pg_clipfrac: RuleConfig = _rule("Share of a mini-batch's tokens that the policy's clip bounds.", warn=0.3)
    pg_clipfrac_lower: RuleConfig = _rule(
        "Share of a mini-batch's tokens that the dual clip bounds.", warn=0.05
    )
    vf_clipfrac: RuleConfig = _rule("Share of a mini-batch's tokens that the value clip bounds.", warn=0.05)
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
        "Share of the step's prompt groups whose rewards are all equal, so that they teach nothing."
    )
    component_constant: RuleConfig = _rule(
        "Number of consecutive steps, up to guard.window, in which a scorer gave all responses the same "
        "value, so that it distinguishes nothing.",
        warn=20.0,
    )
    reward_errors: RuleConfig = _rule(
        "The larger of two shares of a step: the prompt groups that were dropped because a sample has no "
        "reward, and the responses that a scorer with required: false could not score.",
        warn=0.1,
    )
    out_of_memory: RuleConfig = _rule(
        "Number of the step's optimizer steps that ran out of GPU memory and were repeated with halved "
        "micro-batches."
    )
    non_finite: RuleConfig = _rule(
        "Number of losses, gradients and metrics of the step that are NaN or infinite; "
        "such an optimizer step is never taken.",
        warn=0.0,
        stop=0.0,
        patience=10,
    )
    mismatch_kl: RuleConfig = _rule(
        "KL between rollout and learner on the step's tokens (rollout/mismatch_kl), in multiples of the "
        "value that model.dtype allows: 1e-6 for float32, 0.01 for bfloat16.",
        warn=1.0,
        stop=10.0,
    )
    throughput: RuleConfig = _rule(
        "Tokens per second of sampling, scoring and training, as a share of the running median; fires at or "
        "below its bounds.",
        warn=0.25,
    )
    val_fall: RuleConfig = _rule(
        "Gap, in units of the reward, by which the confidence interval of a validation's mean reward lies "
        "below that of the best validation so far, for each set of held-out prompts. 0: the two intervals "
        "touch.",
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
        """Merges a rule's given keys into its defaults; `false` (in YAML also `off`) disables one rule or all
        of them."""
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
