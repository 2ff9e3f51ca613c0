"""The tables of algorithms: each line fits its function and its options in the configuration."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from paceline.algorithms import advantages, kl, policy_losses
from paceline.algorithms.rows import SampleRows
from paceline.algorithms.users_own import own
from paceline.config.load import section_types
from paceline.config.training.actor import ActorConfig
from paceline.config.training.algorithm import AlgorithmConfig, KLKind
from paceline.config.training.policy_losses import CovarianceLoss
from paceline.core.errors import ConfigError
from paceline.core.estimators import ADV_ESTIMATORS

pytestmark = pytest.mark.torch


OPTIONS_OF_LOSSES = section_types(ActorConfig.model_fields["policy_loss"])


POLICY_LOSSES = sorted(OPTIONS_OF_LOSSES.keys() - {"custom"})


def test_every_loss_has_its_options_and_every_option_its_loss():
    """What docs/where-to-change-what.md asks for: a function and an options model of one name."""
    functions = set(policy_losses.__all__) - {"LossInputs", "LossOutputs", "TopK", "highest_covariance"}
    assert functions == set(POLICY_LOSSES)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_loss_takes_the_arguments_of_its_options_and_reports_ppo_kl(name):
    clip = {"gspo": 4e-4, "geo_mean": 0.4}.get(name, 0.2)
    arguments = ActorConfig(policy_loss=name, clip_ratio=clip).loss_arguments
    function = getattr(policy_losses, name)
    assert arguments.keys() == inspect.signature(function).parameters.keys() - {"inputs"}
    ones, table = torch.ones(1, 2), torch.full((1, 2, 4), 0.25).log()
    inputs = policy_losses.LossInputs(
        log_probs=-ones,
        log_probs_of={"old": -ones},
        advantages=ones,
        mask=ones,
        selected=ones.bool(),
        top_k=policy_losses.TopK(policy=table, teacher=table),
    )
    metrics = function(inputs, **arguments).metrics
    assert "ppo_kl" in metrics
    assert own.RESERVED_METRICS.isdisjoint(metrics)
    none = replace(inputs, selected=~ones.bool())
    reads_selected = metrics.get("cov_frac", 0.0) != function(none, **arguments).metrics.get("cov_frac", 0.0)
    assert reads_selected == issubclass(OPTIONS_OF_LOSSES[name], CovarianceLoss)


def test_the_configuration_lists_the_kinds_of_kl():
    assert set(get_args(KLKind)) == {name + end for name in kl.KL_ESTIMATES for end in ("", "+")}


def rows_of(**given):
    ones = torch.ones(2, 2)
    tensors = {"scores": ones[0], "token_rewards": ones, "mask": ones, "group_ids": torch.tensor([0, 0])}
    return SampleRows(**tensors | given)


@pytest.mark.parametrize("name", ADV_ESTIMATORS)
def test_the_line_of_an_estimator_fits_its_function(name):
    traits, function = ADV_ESTIMATORS[name], getattr(advantages, name)
    parameters = inspect.signature(function).parameters
    options = {key: parameter for key, parameter in parameters.items() if key != "rows"}
    assert set(traits.options) <= options.keys()
    required = {key for key, parameter in options.items() if parameter.default is parameter.empty}
    assert required <= set(traits.options)
    arguments = AlgorithmConfig(adv_estimator=name).estimator_arguments
    has = {"values": torch.zeros(2, 2)} if "critic" in traits.needs else {}
    has |= {"greedy_scores": torch.zeros(2)} if "greedy" in traits.needs else {}
    assert (function(rows_of(**has), **arguments).returns is not None) == ("critic" in traits.needs)
    if has:
        with pytest.raises(ConfigError, match=f"needs {next(iter(has))}, which this batch does not have"):
            function(rows_of(), **arguments)


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


def test_the_page_on_adding_an_algorithm_holds():
    """The estimator of docs/where-to-change-what.md, in the line that the page gives it."""

    page = (Path(__file__).parents[2] / "docs" / "where-to-change-what.md").read_text(encoding="utf-8")
    code = next(part for part in page.split("```python") if "def median(" in part).split("```")[0]
    scope = dict(vars(advantages))
    exec(textwrap.dedent(code), scope)
    rewards = torch.tensor([[0.0, 1.0], [4.0, 0.0], [0.0, 2.0]])
    rows = SampleRows(
        scores=rewards.sum(-1),
        token_rewards=rewards,
        mask=torch.tensor([[1, 1], [1, 0], [1, 1]]),
        group_ids=torch.tensor([0, 0, 0]),
    )
    got, _ = scope["median"](rows, scale=2.0)
    assert got.tolist() == [[-2.0, -2.0], [4.0, 0.0], [0.0, 0.0]]
