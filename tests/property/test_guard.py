"""The guard's policy over any sequence of readings: bounded scales, counted rollbacks, a state to save."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.guard import GuardConfig
from paceline.controller.guard.policy import GuardDecision, GuardPolicy
from paceline.core.guard import Action, Reading, RuleLimits, crossed, worst

CONFIG = GuardConfig.model_validate(
    {
        "ppo_kl": {"warn": 0.1, "skip": 0.2, "lower_lr": 0.3, "rollback": 0.6, "stop": 0.95},
        "reference_kl": {"lower_kl_coef": 0.3, "fixed_kl": 0.6, "patience": 2},
        "entropy_low": {"warn": 0.5, "lower_kl_coef": 0.1},
        "pg_clipfrac": {"lower_clip": 0.4, "raise_kl_coef": 0.8},
        "max_rollbacks": 2,
    }
)
values = st.floats(0, 1, allow_nan=False)
steps = st.lists(
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("ppo_kl", "reference_kl", "entropy_low", "pg_clipfrac"), values)
    ),
    max_size=25,
)


def readings(step: dict[str, float]) -> list[Reading]:
    return [Reading(rule=rule, value=value) for rule, value in sorted(step.items())]


def judge(policy: GuardPolicy, number: int, step: dict[str, float]) -> GuardDecision:
    decision = policy.judge(number, readings(step))
    if decision.rollback:
        policy.rolled_back()
    return decision


@given(steps)
@settings(max_examples=150, deadline=None)
def test_whatever_comes_the_run_is_adjusted_within_bounds(sequence: list[dict[str, float]]) -> None:
    policy, rollbacks = GuardPolicy(CONFIG, kl_coef=0.01), 0
    lr, kl, clip = 1.0, 1.0, 1.0
    for number, step in enumerate(sequence, 1):
        decision = judge(policy, number, step)
        rollbacks += decision.rollback
        assert not (decision.rollback and decision.stop)
        assert rollbacks == policy.num_rollbacks <= 2
        now = policy.adjustments
        # Scales move by at most one factor a step each, the KL's alone upwards, never beyond their bounds.
        assert now.lr_scale in (lr, max(CONFIG.min_scale, lr * 0.5))
        lower = max(CONFIG.min_scale, kl * 0.5)
        higher = [min(CONFIG.max_kl_scale, scale * 2) for scale in (kl, lower)]
        assert now.kl_scale in (kl, lower, *higher)
        assert now.clip_scale in (clip, max(CONFIG.min_scale, clip * 0.5))
        assert now.fixed_kl_coef in (None, 0.01)
        lr, kl, clip = now.lr_scale, now.kl_scale, now.clip_scale
        beyond_a_warning = any(
            set(crossed(CONFIG.limits[one.rule], one)) - {Action.WARN} for one in readings(step)
        )
        assert decision.good is not beyond_a_warning
        if step.get("ppo_kl", 0.0) > 0.95:
            assert decision.stop
        if decision.stop:
            break


@given(steps, st.integers(0, 25))
@settings(max_examples=150, deadline=None)
def test_its_state_may_be_saved_and_loaded_after_any_step(sequence: list[dict[str, float]], cut: int) -> None:
    straight, broken = GuardPolicy(CONFIG, kl_coef=0.01), GuardPolicy(CONFIG, kl_coef=0.01)
    for number, step in enumerate(sequence, 1):
        if number == cut:
            state = json.loads(json.dumps(broken.state_dict()))
            broken = GuardPolicy(CONFIG, kl_coef=0.01)
            broken.load_state_dict(state)
        assert judge(straight, number, step) == judge(broken, number, step)
    assert straight.state_dict() == broken.state_dict()


@given(st.permutations([0.01, 0.04, 0.2, 0.2, 0.5, -3.0]))
def test_the_worst_does_not_depend_on_the_order(order: list[float]) -> None:
    for rule, expected in (("ppo_kl", 0.5), ("entropy_low", -3.0)):
        (reading,) = worst(Reading(rule=rule, value=value, num_skipped=1) for value in order)
        assert (reading.value, reading.num_skipped) == (expected, 6)


@given(values, st.dictionaries(st.sampled_from(list(Action)), values))
def test_a_worse_value_crosses_at_least_the_same_bounds(value: float, bounds: dict[Action, float]) -> None:
    limits = RuleLimits(bounds=bounds)
    milder = set(crossed(limits, Reading(rule="ppo_kl", value=value)))
    worse = set(crossed(limits, Reading(rule="ppo_kl", value=value + 0.1)))
    assert milder <= worse
    assert {a for a in bounds if bounds[a] < value} == milder
