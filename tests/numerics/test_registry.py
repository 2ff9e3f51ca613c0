"""The tables of algorithms, and the one call that serves every estimator."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from paceline.config.actor import ActorConfig, PolicyLossName
from paceline.config.algorithm import (
    CRITIC_ESTIMATORS,
    GREEDY_ESTIMATORS,
    AdvEstimator,
    AlgorithmConfig,
    KLKind,
)
from paceline.core.errors import ConfigError
from paceline.learner.algorithms import advantages, kl, registry
from paceline.learner.algorithms.estimation import estimate_advantages

pytestmark = pytest.mark.torch


def test_the_tables_hold_these_names():
    assert sorted(registry.ADV_ESTIMATORS) == [
        "dr_grpo",
        "gae",
        "gpg",
        "grpo",
        "opo",
        "pass_at_k",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "rloo",
        "vapo",
    ]
    assert sorted(registry.POLICY_LOSSES) == [
        "cispo",
        "clip_cov",
        "geo_mean",
        "gpg",
        "gspo",
        "kl_cov",
        "ppo_clip",
        "sapo",
    ]


@pytest.mark.parametrize(
    ("look_up", "message"),
    [
        (
            registry.adv_estimator,
            r"algorithm\.adv_estimator 'ppo' is not known; choose one of dr_grpo, gae, gpg",
        ),
        (
            registry.policy_loss,
            r"actor\.policy_loss 'ppo' is not known; choose one of cispo, clip_cov, geo_mean",
        ),
        (registry.kl_kind, r"KL estimate 'ppo' is not known; choose one of abs, k1, k2, k3, kl"),
        (
            registry.loss_agg_mode,
            r"actor\.loss_agg_mode 'ppo' is not known; choose one of seq-mean-token-mean",
        ),
    ],
)
def test_an_unknown_name_is_answered_with_those_there_are(look_up, message):
    with pytest.raises(ConfigError, match=message):
        look_up("ppo")


def test_known_names():
    assert registry.policy_loss("gspo") is registry.POLICY_LOSSES["gspo"]
    assert registry.kl_kind("low_var_kl+") == "low_var_kl+"
    assert registry.loss_agg_mode("token-mean") == "token-mean"


def test_the_configuration_names_what_the_tables_hold():
    # It imports no torch, so it lists the names itself.
    assert set(get_args(AdvEstimator)) == registry.ADV_ESTIMATORS.keys()
    assert set(get_args(PolicyLossName)) == registry.POLICY_LOSSES.keys()
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
    available = {"clip_low": 0.1, "clip_high": 0.2, "dual_clip_c": 3.0, "gamma": 1.0}
    assert registry.select_options(registry.policy_loss("gspo"), available) == {
        "clip_low": 0.1,
        "clip_high": 0.2,
    }
    assert registry.select_options(registry.policy_loss("gpg"), available) == {}
    assert registry.option_names(registry.policy_loss("kl_cov")) == ("cov_fraction", "cov_kl_coef")
    assert [name for name, loss in registry.POLICY_LOSSES.items() if registry.selects_tokens(loss)] == [
        "kl_cov",
        "clip_cov",
    ]
    with pytest.raises(ConfigError, match="gae needs the option 'lam'; options given: gamma"):
        registry.select_options(registry.adv_estimator("gae").function, {"gamma": 1.0})


def test_options_come_from_the_configuration_by_their_names():
    actor = ActorConfig(clip_ratio_low=0.1, use_dual_clip=False, cov_fraction=0.5, tau_negative=3.0)
    taken = {name: registry.configured_options(loss, actor) for name, loss in registry.POLICY_LOSSES.items()}
    assert taken == {
        "ppo_clip": {"clip_low": 0.1, "clip_high": 0.2, "dual_clip_c": None},
        "gspo": {"clip_low": 0.1, "clip_high": 0.2},
        "cispo": {"clip_low": 0.1, "clip_high": 0.2},
        "kl_cov": {"cov_fraction": 0.5, "cov_kl_coef": 1.0},
        "clip_cov": {"clip_low": 0.1, "clip_high": 0.2, "cov_fraction": 0.5, "cov_low": 1.0, "cov_high": 5.0},
        "gpg": {},
        "sapo": {"tau_positive": 1.0, "tau_negative": 3.0},
        "geo_mean": {"clip_low": 0.1, "clip_high": 0.2},
    }
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
