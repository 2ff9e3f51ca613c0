"""The tables of algorithms: each line fits its function and its options in the configuration."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from typing import get_args

import pytest
import torch

from paceline.algorithms import advantages, kl, policy_losses, registry
from paceline.algorithms.estimators import EstimatorInputs, of_groups
from paceline.algorithms.policy_losses import custom
from paceline.algorithms.statistics import masked_whiten
from paceline.config.actor import ActorConfig
from paceline.config.algorithm import AlgorithmConfig, KLKind
from paceline.config.estimators import ADV_ESTIMATORS
from paceline.config.load import section_types
from paceline.config.policy_losses import CovarianceLoss
from paceline.core.errors import ConfigError

pytestmark = pytest.mark.torch


OPTIONS_OF_LOSSES = section_types(ActorConfig.model_fields["policy_loss"])


def test_every_loss_has_its_options_and_every_option_its_loss():
    """What docs/add-an-algorithm.md asks for: a function, its options model and a registry line."""
    missing = OPTIONS_OF_LOSSES.keys() - {"custom"} - registry.POLICY_LOSSES.keys()
    assert not missing, f"paceline/algorithms/registry.py: POLICY_LOSSES has no line for {missing}"
    missing = registry.POLICY_LOSSES.keys() - OPTIONS_OF_LOSSES.keys()
    assert not missing, f"config/policy_losses.py: PolicyLossConfig has no options model for {missing}"


@pytest.mark.parametrize("name", registry.POLICY_LOSSES)
def test_a_loss_takes_the_arguments_of_its_options_and_returns_the_metrics_of_its_line(name):
    clip = {"gspo": 4e-4, "geo_mean": 0.4}.get(name, 0.2)
    arguments = ActorConfig(policy_loss=name, clip_ratio=clip).loss_arguments
    function = getattr(policy_losses, name)
    tensors = {"inputs", "log_probs", "old_log_probs", "advantages", "mask", "selected"}
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


def test_the_configuration_lists_the_kinds_of_kl():
    assert set(get_args(KLKind)) == {name + end for name in kl.KL_ESTIMATES for end in ("", "+")}


def test_every_estimator_has_its_line_in_both_tables():
    """What docs/add-an-algorithm.md asks for: a function and a line in each."""
    missing = ADV_ESTIMATORS.keys() - registry.ADV_ESTIMATORS.keys()
    assert not missing, f"paceline/algorithms/registry.py: ADV_ESTIMATORS has no line for {missing}"
    missing = registry.ADV_ESTIMATORS.keys() - ADV_ESTIMATORS.keys()
    assert not missing, f"config/estimators.py: ADV_ESTIMATORS has no line for {missing}"


@pytest.mark.parametrize("name", registry.ADV_ESTIMATORS)
def test_both_lines_of_an_estimator_fit_its_function(name):
    traits, needs = ADV_ESTIMATORS[name], registry.ADV_ESTIMATORS[name].needs
    assert traits.needs_critic == ("values" in needs)
    assert traits.needs_greedy == ("greedy_scores" in needs)
    tensors = {"token_rewards", "mask", "values", "scores", "group_ids", "greedy_scores", "shard"}
    parameters = inspect.signature(getattr(advantages, name)).parameters
    options = {key: parameter for key, parameter in parameters.items() if key not in tensors}
    assert set(traits.options) <= options.keys()
    required = {key for key, parameter in options.items() if parameter.default is parameter.empty}
    assert required <= set(traits.options)


def test_options_come_from_the_configuration():
    algorithm = AlgorithmConfig(gamma=0.9, lam=0.8, alpha=0.3, norm_adv_by_std_in_grpo=False)
    arguments = {
        name: algorithm.model_copy(update={"adv_estimator": name}).estimator_arguments
        for name in ADV_ESTIMATORS
    }
    assert {name: options for name, options in arguments.items() if options} == {
        "gae": {"gamma": 0.9, "lam": 0.8},
        "vapo": {"gamma": 0.9, "lam_policy": None, "lam_critic": 1.0, "alpha": 0.3},
        "grpo": {"normalize_by_std": False},
        "reinforce_plus_plus": {"gamma": 0.9},
    }


def test_an_estimator_without_its_tensors_says_which():
    ones = torch.ones(2, 2)
    inputs = EstimatorInputs(scores=ones[0], token_rewards=ones, mask=ones, group_ids=torch.tensor([0, 0]))
    with pytest.raises(ConfigError, match="needs values, which this batch does not have"):
        registry.ADV_ESTIMATORS["gae"](inputs, {"gamma": 1.0, "lam": 1.0})
    with pytest.raises(ConfigError, match="needs greedy_scores"):
        registry.ADV_ESTIMATORS["remax"](inputs, {})


def test_the_learners_call_gives_what_the_public_functions_give():
    torch.manual_seed(0)
    mask = (torch.rand(6, 5) > 0.3).double()
    mask[:, 0] = 1
    rewards, values = torch.randn(6, 5).double() * mask, torch.randn(6, 5).double()
    groups, greedy, scores = torch.tensor([0, 1, 0, 1, 1, 0]), torch.randn(6).double(), rewards.sum(-1)
    inputs = EstimatorInputs(
        scores=scores,
        token_rewards=rewards,
        mask=mask,
        group_ids=groups,
        values=values,
        greedy_scores=greedy,
    )
    tensors = {
        "gae": (rewards, values, mask),
        "vapo": (rewards, values, mask),
        "reinforce_plus_plus": (rewards, mask),
        "remax": (rewards, mask, greedy),
    }
    for name, estimator in registry.ADV_ESTIMATORS.items():
        arguments = AlgorithmConfig(adv_estimator=name, gamma=0.9, lam=0.8).estimator_arguments
        wanted = getattr(advantages, name)(*tensors.get(name, (scores, mask, groups)), **arguments)
        got, returns = estimator(inputs, arguments)
        if ADV_ESTIMATORS[name].needs_critic:
            assert torch.equal(returns, wanted[1])
            wanted = masked_whiten(wanted[0], mask) * mask
        else:
            assert returns is None
        assert torch.equal(got, wanted), name


def test_the_page_on_adding_an_algorithm_holds():
    """The estimator of docs/add-an-algorithm.md, in the line that the page gives it."""

    page = (Path(__file__).parents[2] / "docs" / "add-an-algorithm.md").read_text(encoding="utf-8")
    code = next(part for part in page.split("```python") if "def median(" in part).split("```")[0]
    scope = dict(vars(advantages))
    exec(textwrap.dedent(code), scope)
    median = of_groups(scope["median"])
    rewards = torch.tensor([[0.0, 1.0], [4.0, 0.0], [0.0, 2.0]])
    inputs = EstimatorInputs(
        scores=rewards.sum(-1),
        token_rewards=rewards,
        mask=torch.tensor([[1, 1], [1, 0], [1, 1]]),
        group_ids=torch.tensor([0, 0, 0]),
    )
    got, _ = median(inputs, {"scale": 2.0})
    assert got.tolist() == [[-2.0, -2.0], [4.0, 0.0], [0.0, 0.0]]
