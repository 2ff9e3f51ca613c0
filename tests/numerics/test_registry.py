"""The tables of algorithms, and the one call that serves every estimator."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest
import torch

from paceline.config.actor import ActorConfig
from paceline.config.algorithm import (
    CRITIC_ESTIMATORS,
    GREEDY_ESTIMATORS,
    AdvEstimator,
    AlgorithmConfig,
    KLKind,
)
from paceline.config.load import section_types
from paceline.config.policy_losses import CovarianceLoss
from paceline.core.errors import ConfigError
from paceline.learner.algorithms import advantages, kl, policy_losses, registry
from paceline.learner.algorithms.estimation import estimate_advantages
from paceline.learner.algorithms.policy_losses import custom

pytestmark = pytest.mark.torch


OPTIONS_OF_LOSSES = section_types(ActorConfig.model_fields["policy_loss"])


def test_every_loss_has_its_options_and_every_option_its_loss():
    """What docs/add-an-algorithm.md asks for: a function, its options model and a registry line."""
    missing = OPTIONS_OF_LOSSES.keys() - {"custom"} - registry.POLICY_LOSSES.keys()
    assert not missing, f"learner/algorithms/registry.py: POLICY_LOSSES has no line for {missing}"
    missing = registry.POLICY_LOSSES.keys() - OPTIONS_OF_LOSSES.keys()
    assert not missing, f"config/policy_losses.py: PolicyLossConfig has no options model for {missing}"


@pytest.mark.parametrize("name", registry.POLICY_LOSSES)
def test_a_loss_takes_the_arguments_of_its_options_and_returns_the_metrics_of_its_line(name):
    clip = {"gspo": 4e-4, "geo_mean": 0.4}.get(name, 0.2)
    arguments = ActorConfig(policy_loss=name, clip_ratio=clip).loss_arguments
    function = getattr(policy_losses, name)
    tensors = {"log_probs", "old_log_probs", "advantages", "mask", "selected"}
    assert arguments.keys() == inspect.signature(function).parameters.keys() - tensors
    ones = torch.ones(1, 2)
    inputs = policy_losses.LossInputs(
        log_probs=-ones, old_log_probs=-ones, advantages=ones, mask=ones, selected=ones.bool()
    )
    loss = registry.POLICY_LOSSES[name]
    outputs = loss.function(inputs, **arguments)
    assert set(outputs.metrics) == set(loss.metrics), f"registry.py: the line of {name} names other metrics"
    assert custom.RESERVED_METRICS.isdisjoint(loss.metrics)
    selects = issubclass(OPTIONS_OF_LOSSES[name], CovarianceLoss)
    assert selects == ("selected" in inspect.signature(function).parameters)


def test_the_configuration_names_what_the_tables_hold():
    # It imports no torch, so it lists the names itself.
    assert set(get_args(AdvEstimator)) == registry.ADV_ESTIMATORS.keys()
    assert set(get_args(KLKind)) == {name + end for name in kl.KL_ESTIMATES for end in ("", "+")}
    assert {
        name for name, one in registry.ADV_ESTIMATORS.items() if "values" in one.needs
    } == CRITIC_ESTIMATORS
    assert {
        name for name, one in registry.ADV_ESTIMATORS.items() if "greedy_scores" in one.needs
    } == GREEDY_ESTIMATORS


def test_what_estimators_need():
    needs = {name: estimator.needs for name, estimator in registry.ADV_ESTIMATORS.items()}
    assert {name for name in needs if "values" in needs[name]} == {"gae", "vapo"}
    assert {name for name in needs if "greedy_scores" in needs[name]} == {"remax"}
    assert {name for name in needs if "group_ids" not in needs[name]} == {
        "gae",
        "vapo",
        "remax",
        "reinforce_plus_plus",
    }


def test_ranks_gather_in_the_same_order():
    # Each rank is a process of its own, with its own order of sets.
    order = registry.ESTIMATOR_TENSORS
    for estimator in registry.ADV_ESTIMATORS.values():
        assert list(estimator.needs) == sorted(estimator.needs, key=order.index)


def test_options_are_taken_by_name_and_missed_by_name():
    with pytest.raises(ConfigError, match="gae needs the option 'lam'; options given: gamma"):
        registry.select_options(registry.adv_estimator("gae").function, {"gamma": 1.0})


def test_options_come_from_the_configuration_by_their_names():
    algorithm = AlgorithmConfig(gamma=0.9, lam=0.8, alpha=0.3, norm_adv_by_std_in_grpo=False)
    assert {
        name: options
        for name, one in registry.ADV_ESTIMATORS.items()
        if (options := registry.configured_options(one.function, algorithm))
    } == {
        "gae": {"gamma": 0.9, "lam": 0.8},
        "vapo": {"gamma": 0.9, "lam_policy": None, "lam_critic": 1.0, "alpha": 0.3},
        "grpo": {"normalize_by_std": False},
        "reinforce_plus_plus": {"gamma": 0.9},
    }


def test_an_estimator_without_its_tensors_says_which():
    rewards = torch.ones(2, 2)
    with pytest.raises(ConfigError, match="gae needs values"):
        estimate_advantages(
            registry.adv_estimator("gae"), {"gamma": 1, "lam": 1}, token_rewards=rewards, mask=rewards
        )
    with pytest.raises(ConfigError, match="exactly one of per_sequence and per_token"):
        _ = registry.Estimator().function


def test_the_one_call_gives_what_the_public_functions_give():
    torch.manual_seed(0)
    mask = (torch.rand(6, 5) > 0.3).double()
    mask[:, 0] = 1
    rewards, values = torch.randn(6, 5).double() * mask, torch.randn(6, 5).double()
    groups, greedy, scores = torch.tensor([0, 1, 0, 1, 1, 0]), torch.randn(6).double(), rewards.sum(-1)
    adv = advantages
    whiten = adv.masked_whiten
    expected = {
        "gae": whiten(adv.gae(rewards, values, mask, 0.9, 0.8)[0], mask) * mask,
        "vapo": whiten(adv.vapo(rewards, values, mask, 0.9)[0], mask) * mask,
        "grpo": adv.grpo(scores, mask, groups),
        "dr_grpo": adv.grpo(scores, mask, groups, normalize_by_std=False),
        "rloo": adv.rloo(scores, mask, groups),
        "reinforce_plus_plus": adv.reinforce_plus_plus(rewards, mask, 0.9),
        "reinforce_plus_plus_baseline": adv.reinforce_plus_plus_baseline(scores, mask, groups),
        "remax": adv.remax(rewards, mask, greedy),
        "opo": adv.opo(scores, mask, groups),
        "gpg": adv.gpg(scores, mask, groups),
        "pass_at_k": adv.pass_at_k(scores, mask, groups),
    }
    assert expected.keys() == registry.ADV_ESTIMATORS.keys()
    for name, wanted in expected.items():
        got, returns = estimate_advantages(
            registry.adv_estimator(name),
            {"gamma": 0.9, "lam": 0.8},
            token_rewards=rewards,
            mask=mask,
            group_ids=groups,
            values=values,
            greedy_scores=greedy,
        )
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9, msg=name)
        assert (returns is not None) == (name in ("gae", "vapo"))


def test_the_page_on_adding_an_algorithm_holds(monkeypatch):
    """The function of docs/add-an-algorithm.md, registered as the page says, through the call that the learner makes."""

    def median_baseline(scores, lengths, group_ids, scale=1.0):
        baseline = torch.stack([scores[group_ids == group].median() for group in group_ids])
        return scale * (scores - baseline)

    table = {**registry.ADV_ESTIMATORS, "median": registry.Estimator(per_sequence=median_baseline)}
    monkeypatch.setattr(registry, "ADV_ESTIMATORS", table)
    rewards = torch.tensor([[0.0, 1.0], [4.0, 0.0], [0.0, 2.0]])
    got, _ = estimate_advantages(
        registry.adv_estimator("median"),
        {"scale": 2.0, "gamma": 1.0},
        token_rewards=rewards,
        mask=torch.tensor([[1, 1], [1, 0], [1, 1]]),
        group_ids=torch.tensor([0, 0, 0]),
    )
    assert got.tolist() == [[-2.0, -2.0], [4.0, 0.0], [0.0, 0.0]]
