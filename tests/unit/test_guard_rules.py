"""The guard's rules by themselves: what crosses a bound, medians, configuration by dotted keys."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.config.guard import GuardConfig
from paceline.config.load import load, parse
from paceline.config.run import RunConfig
from paceline.controller.guard.policy import GuardPolicy
from paceline.core.errors import ConfigError
from paceline.core.guard import (
    RULES,
    Action,
    Adjustments,
    Histories,
    Reading,
    RuleLimits,
    crossed,
    describe,
    spread,
    worst,
)

LADDER = RuleLimits(bounds={Action.WARN: 0.03, Action.SKIP: 0.05, Action.STOP: 0.2})


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (-0.1, []),
        (0.03, []),
        (0.0301, ["warn"]),
        (0.06, ["warn", "skip"]),
        (7.0, ["warn", "skip", "stop"]),
        (math.nan, []),
    ],
)
def test_a_rule_fires_above_its_bounds(value: float, names: list[str]) -> None:
    assert [a.value for a in crossed(LADDER, Reading(rule="ppo_kl", value=value))] == names


def test_a_rule_from_below_fires_at_its_bound() -> None:
    limits = RuleLimits(bounds={Action.WARN: 0.0})
    assert crossed(limits, Reading(rule="reward_constant", value=0.0)) == (Action.WARN,)
    assert crossed(limits, Reading(rule="reward_constant", value=1e-9)) == ()


def test_a_relative_rule_measures_by_the_median_and_never_without_one() -> None:
    limits = RuleLimits(bounds={Action.WARN: 10.0})
    for value, reference, fires in ((5.1, 0.5, True), (4.9, 0.5, False), (1e9, 0.0, False)):
        reading = Reading(rule="grad_norm", network="actor", value=value, reference=reference)
        assert bool(crossed(limits, reading)) is fires
    slow = Reading(rule="throughput", value=240.0, reference=1000.0)
    assert crossed(RuleLimits(bounds={Action.WARN: 0.25}), slow) == (Action.WARN,)
    words = describe(Reading(rule="grad_norm", network="critic", value=6.0, reference=0.5), 10.0, Action.WARN)
    assert words == "critic grad_norm is 6, above 5, 10 times its running median (guard.grad_norm.warn)"
    words = describe(Reading(rule="mismatch_kl", value=2e-6, reference=1e-6), 1.0, Action.WARN)
    allowed = "above 1e-06, which is what model.dtype allows"
    assert words == f"rollout/mismatch_kl is 2e-06, {allowed} (guard.mismatch_kl.warn)"


def test_histories_give_the_median_of_the_last_values_once_there_are_enough() -> None:
    histories = Histories(window=5, min_history=3)
    seen = []
    for value in (1.0, 3.0, math.inf, 2.0, 100.0, 100.0, 100.0):
        seen.append(histories.reference("x"))
        histories.add("x", value)
    # Infinity is left out; of five values the first goes.
    assert seen == [None, None, None, None, 2.0, 2.5, 3.0]
    assert histories.reference("x") == 100.0
    again = Histories(window=5, min_history=3)
    again.load_state_dict(histories.state_dict())
    assert again.state_dict() == histories.state_dict() == {"x": [3.0, 2.0, 100.0, 100.0, 100.0]}
    zeros = Histories(window=5, min_history=1)
    zeros.add("x", 0.0)
    assert zeros.reference("x") is None


def test_the_worst_of_a_step_counts_all_that_was_skipped() -> None:
    readings = [
        Reading(rule="ppo_kl", network="actor", value=0.06, num_skipped=1),
        Reading(rule="entropy_low", network="actor", value=0.5),
        Reading(rule="ppo_kl", network="actor", value=0.09, num_skipped=1),
        Reading(rule="entropy_low", network="actor", value=0.2),
        Reading(rule="grad_norm", network="actor", value=5.0, reference=1.0),
        Reading(rule="grad_norm", network="critic", value=50.0, reference=10.0),
        Reading(rule="grad_norm", network="actor", value=4.0, reference=0.5),
    ]
    assert worst(readings) == [
        Reading(rule="ppo_kl", network="actor", value=0.09, num_skipped=2),
        Reading(rule="entropy_low", network="actor", value=0.2),
        Reading(rule="grad_norm", network="actor", value=4.0, reference=0.5),
        Reading(rule="grad_norm", network="critic", value=50.0, reference=10.0),
    ]


def test_equal_rewards_have_no_spread_at_all() -> None:
    assert spread([0.1] * 3) == 0.0
    assert spread([1.0, 2.0, 3.0, 4.0]) == pytest.approx(math.sqrt(1.25))


def test_the_coefficient_in_force() -> None:
    assert Adjustments().kl_coef(0.05) == 0.05
    assert Adjustments(kl_scale=0.5).kl_coef(0.05) == 0.025
    assert Adjustments(kl_scale=0.5, fixed_kl_coef=0.01).kl_coef(9.0) == 0.005


# --- configuration

MINIMAL: dict[str, Any] = {
    "data": {"train_files": "t.jsonl"},
    "model": {"path": "m"},
    "reward": {"functions": [{"name": "exact_match"}]},
    "trainer": {"total_steps": 1},
}


def test_the_defaults_are_those_that_the_page_states() -> None:
    bounds = {
        name: {a.value: b for a, b in limits.bounds.items()} for name, limits in GuardConfig().limits.items()
    }
    assert bounds == {
        "ppo_kl": {"warn": 0.03, "skip": 0.05},
        "reference_kl": {"warn": 1.0},
        "grad_norm": {"warn": 10.0, "skip": 100.0},
        "pg_clipfrac": {"warn": 0.3},
        "pg_clipfrac_lower": {"warn": 0.05},
        "vf_clipfrac": {"warn": 0.05},
        "entropy_low": {},
        "entropy_high": {"warn": 3.0},
        "reward_constant": {"warn": 0.0},
        "reward_jump": {"warn": 100.0, "skip": 1000.0},
        "groups_without_spread": {},
        "component_constant": {"warn": 20.0},
        "reward_errors": {"warn": 0.1},
        "out_of_memory": {},
        "non_finite": {"warn": 0.0, "stop": 0.0},
        "mismatch_kl": {"warn": 1.0, "stop": 10.0},
        "throughput": {"warn": 0.25},
        "val_fall": {"warn": 0.0},
    }
    assert set(bounds) == set(RULES)


def test_one_dotted_key_changes_one_bound(tmp_path: Any) -> None:
    import yaml

    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(MINIMAL))
    config = load(RunConfig, file, ["guard.ppo_kl.stop=0.2", "guard.ppo_kl.skip=null", "guard.grad_norm=off"])
    assert config.guard.limits["ppo_kl"].bounds == {Action.WARN: 0.03, Action.STOP: 0.2}
    assert "grad_norm" not in config.guard.limits
    assert config.guard.limits["vf_clipfrac"].bounds == {Action.WARN: 0.05}
    assert load(RunConfig, file, ["guard.enabled=false"]).guard.limits == {}
    assert load(RunConfig, file, ["guard=off"]).guard.limits == {}
    assert load(RunConfig, file, ["guard.ppo_kl=on"]).guard == GuardConfig()
    again = RunConfig.model_validate_json(config.model_dump_json())
    assert again.guard == config.guard
    assert config.guard.uses(Action.STOP)
    assert not config.guard.uses(Action.ROLLBACK)


@pytest.mark.parametrize(
    ("guard", "said"),
    [
        ({"throughput": {"skip": 0.1}}, "guard.throughput cannot skip; its actions are warn, stop"),
        ({"ppo_kl": {"sotp": 0.1}}, "unknown key guard.ppo_kl.sotp; did you mean 'stop'?"),
        ({"ppo_kl": {"stop": -1}}, "guard.ppo_kl.stop=-1"),
        ({"entropy_low": {"lower_kl_coef": 0.1}}, "no KL is in use: set algorithm.use_kl_in_reward"),
        ({"reference_kl": {"raise_kl_coef": 3.0}}, "may raise_kl_coef, but no KL is in use"),
        ({"reference_kl": {"fixed_kl": 3.0}}, "no coefficient is adaptive"),
        (
            {"ppo_kl": 0.2},
            "guard.ppo_kl=0.2: which action? Write guard.ppo_kl.warn=0.2, say, or guard.ppo_kl=off",
        ),
        ({"lr_factor": 1.0}, "guard.lr_factor=1.0"),
    ],
)
def test_what_a_rule_cannot_do_is_said(guard: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(RunConfig, {**MINIMAL, "guard": guard})
    assert said in str(raised.value)


def test_a_loss_without_a_clip_range_cannot_have_it_lowered() -> None:
    guard = {"ppo_kl": {"lower_clip": 0.1}}
    with pytest.raises(ConfigError, match="actor.policy_loss=gpg has no clip range"):
        parse(RunConfig, {**MINIMAL, "guard": guard, "actor": {"policy_loss": "gpg"}})
    parse(RunConfig, {**MINIMAL, "guard": guard})


def test_a_rollback_ends_all_streaks() -> None:
    """What the steps that were taken back had crossed does not count towards a rule's patience again."""
    rules = {"ppo_kl": {"warn": 0.1, "stop": 0.2, "patience": 2}, "reward_jump": {"rollback": 5.0}}
    policy = GuardPolicy(GuardConfig.model_validate(rules), kl_coef=0.01)
    crossing = Reading(rule="ppo_kl", network="actor", value=0.3)
    jump = Reading(rule="reward_jump", value=9.0, reference=1.0)
    assert policy.judge(1, [crossing, jump]).rollback
    policy.rolled_back()
    again = policy.judge(2, [crossing])
    assert (again.stop, [firing.streak for firing in again.firings]) == ("", [1])
    assert "for 2 steps now" in policy.judge(3, [crossing]).stop
