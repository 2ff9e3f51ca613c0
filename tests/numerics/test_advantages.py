"""Advantage estimators against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.algorithms import advantages
from paceline.algorithms.rows import SampleRows
from paceline.algorithms.statistics import masked_whiten
from paceline.core.errors import ConfigError, NumericsError

pytestmark = pytest.mark.torch

NAN = float("nan")
SCORES = torch.tensor([1.0, 3.0, 0.0, 1.0, 2.0, 7.0])
GROUPS = torch.tensor([4, 4, -1, -1, -1, 9])  # a pair, three, and one alone
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 0, 1], [1, 1, 1], [1, 0, 0]])
ROOT_HALF = 1 / math.sqrt(2)


def of_groups(estimator, scores, mask, group_ids, **options):
    rows = SampleRows(scores=scores, token_rewards=torch.zeros(mask.shape), mask=mask, group_ids=group_ids)
    return estimator(rows, **options).advantages


def of_tokens(estimator, token_rewards, mask, *, values=None, greedy_scores=None, **options):
    rows = SampleRows(
        scores=token_rewards.sum(-1),
        token_rewards=token_rewards,
        mask=mask,
        group_ids=torch.arange(len(mask)),
        values=values,
        greedy_scores=greedy_scores,
    )
    return estimator(rows, **options)


def per_sequence(result: torch.Tensor) -> list[float]:
    """The one advantage of each sequence, after a look that it is on its tokens and nowhere else."""
    assert torch.equal(result != 0, (result[:, :1] != 0) & MASK.bool())
    return result[:, 0].tolist()


def test_gae_of_three_tokens():
    result, returns = advantages.generalized_advantages(
        torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.1, 0.2, 0.3]]), torch.ones(1, 3), gamma=1.0, lam=0.5
    )
    assert result.tolist()[0] == pytest.approx([0.325, 0.45, 0.7])
    assert returns.tolist()[0] == pytest.approx([0.425, 0.65, 1.0])


def test_gae_steps_over_a_hole_and_over_padding():
    rewards = torch.tensor([[0.5, NAN, 1.0, NAN]])
    values = torch.tensor([[0.2, NAN, 0.4, NAN]])
    result, returns = advantages.generalized_advantages(
        rewards, values, torch.tensor([[1, 0, 1, 0]]), gamma=0.9, lam=0.5
    )
    assert result.tolist()[0] == pytest.approx([0.93, 0.6, 0.6, 0.0])  # under the mask: carried through
    assert returns[0, [0, 2]].tolist() == pytest.approx([1.13, 1.0])


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_gae_at_the_ends_of_lambda(lam):
    rewards, values = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 0.25]])
    result, returns = advantages.generalized_advantages(rewards, values, torch.ones(1, 2), gamma=0.5, lam=lam)
    monte_carlo, one_step = [1.5, 1.75], [1 + 0.125 - 0.5, 1.75]
    assert result.tolist()[0] == pytest.approx(monte_carlo if lam else one_step)
    assert torch.equal(returns, result + values)


def test_gae_takes_a_lambda_for_each_sequence():
    rewards, values = torch.randn(2, 4), torch.randn(2, 4)
    both, _ = advantages.generalized_advantages(
        rewards, values, torch.ones(2, 4), 0.9, torch.tensor([0.3, 0.8])
    )
    for row, lam in enumerate((0.3, 0.8)):
        alone, _ = advantages.generalized_advantages(rewards, values, torch.ones(2, 4), 0.9, lam)
        torch.testing.assert_close(both[row], alone[row])


def test_length_adaptive_lambda():
    lengths = torch.tensor([100, 40, 20, 5, 0])
    assert advantages.length_adaptive_lambda(lengths, 0.05).tolist() == pytest.approx(
        [0.8, 0.5, 0, 0, 0], abs=1e-6
    )


def test_vapo_uses_one_lambda_for_the_policy_and_one_for_the_critic():
    torch.manual_seed(0)
    rewards, values, mask = torch.randn(2, 50), torch.randn(2, 50), torch.ones(2, 50)
    mask[1, 40:] = 0
    result, returns = of_tokens(advantages.vapo, rewards, mask, gamma=1.0, values=values)
    adaptive = torch.tensor([1 - 1 / 2.5, 1 - 1 / 2.0])
    raw, _ = advantages.generalized_advantages(rewards, values, mask, 1.0, adaptive)
    torch.testing.assert_close(result, masked_whiten(raw, mask) * mask)
    torch.testing.assert_close(returns, advantages.generalized_advantages(rewards, values, mask, 1.0, 1.0)[1])
    fixed, _ = of_tokens(advantages.vapo, rewards, mask, gamma=1.0, values=values, lam_policy=0.95)
    raw, _ = advantages.generalized_advantages(rewards, values, mask, 1.0, 0.95)
    torch.testing.assert_close(fixed, masked_whiten(raw, mask) * mask)


def test_grpo():
    result = per_sequence(of_groups(advantages.grpo, SCORES, MASK, GROUPS))
    assert result == pytest.approx([-ROOT_HALF, ROOT_HALF, -1.0, 0.0, 1.0, 7.0], abs=1e-5)


def test_dr_grpo_leaves_out_the_division():
    result = per_sequence(of_groups(advantages.grpo, SCORES, MASK, GROUPS, normalize_by_std=False))
    assert result == pytest.approx([-1.0, 1.0, -1.0, 0.0, 1.0, 7.0])


def test_rloo():
    result = per_sequence(of_groups(advantages.rloo, SCORES, MASK, GROUPS))
    assert result == pytest.approx([-2.0, 2.0, -1.5, 0.0, 1.5, 7.0])


def test_opo_weighs_the_baseline_by_length():
    # lengths 3, 1 | 2, 2, 3 | 1: baselines (3 + 3) / 4 and (0 + 2 + 6) / 7
    result = per_sequence(of_groups(advantages.opo, SCORES, MASK, GROUPS))
    assert result == pytest.approx([-0.5, 1.5, -8 / 7, -1 / 7, 6 / 7, 7.0])


def test_gpg_scales_by_the_share_of_scores_that_say_something():
    result = per_sequence(of_groups(advantages.gpg, SCORES, MASK, GROUPS))
    assert result == pytest.approx([x * 6 / 5 for x in (-1.0, 1.0, -1.0, 0.0, 1.0, 7.0)])
    assert of_groups(advantages.gpg, torch.zeros(6), MASK, GROUPS).abs().sum() == 0


def test_pass_at_k_rewards_the_best_alone():
    scores, groups = SCORES[:5], GROUPS[:5]
    result = of_groups(advantages.pass_at_k, scores, MASK[:5], groups)
    assert result[:, 0].tolist() == pytest.approx([0.0, 2 / math.sqrt(2), 0.0, 0.0, 1.0], abs=1e-5)
    assert result[4].tolist() == pytest.approx([1.0, 1.0, 1.0], abs=1e-5)
    with pytest.raises(NumericsError, match=r"a group has one sample; set rollout\.n to 2 or more"):
        of_groups(advantages.pass_at_k, SCORES, MASK, GROUPS)


def test_reinforce_plus_plus_discounts_tokens_and_not_holes():
    rewards = torch.tensor([[0.0, NAN, 1.0, NAN], [0.0, 0.0, 2.0, 0.0]])
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1]])
    to_go = advantages.return_to_go(rewards, mask, 0.5)
    assert to_go[mask.bool()].tolist() == pytest.approx([0.5, 1.0, 0.5, 1.0, 2.0, 0.0])
    result = of_tokens(advantages.reinforce_plus_plus, rewards, mask, gamma=0.5).advantages
    mean, std = 5 / 6, math.sqrt((0.25 + 1 + 0.25 + 1 + 4 - 25 / 6) / 5)
    expected = [(x - mean) / std for x in (0.5, 1.0, 0.5, 1.0, 2.0, 0.0)]
    assert result[mask.bool()].tolist() == pytest.approx(expected)
    assert result[0, 1].item() == result[0, 3].item() == 0.0


def test_reinforce_plus_plus_baseline_whitens_over_tokens():
    scores, groups = torch.tensor([1.0, 3.0]), torch.tensor([0, 0])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    # -1 on three tokens and 1 on one: mean -1/2, unbiased variance 1
    result = of_groups(advantages.reinforce_plus_plus_baseline, scores, mask, groups)
    torch.testing.assert_close(result, torch.tensor([[-0.5, -0.5, -0.5], [1.5, 0.0, 0.0]]))


def test_remax_takes_the_greedy_score_off_every_token():
    rewards = torch.tensor([[-0.1, NAN, 1.0], [0.0, 0.5, 0.0]])
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    result = of_tokens(advantages.remax, rewards, mask, greedy_scores=torch.tensor([0.25, 1.0])).advantages
    torch.testing.assert_close(result, torch.tensor([[0.65, 0.0, 0.75], [-0.5, -0.5, 0.0]]))


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "pass_at_k"])
def test_groups_with_equal_scores_give_exactly_nothing(name):
    # 0.1 three times does not add up to 0.3 in float32; divided by a spread of 1e-6 the rest would be an
    # advantage.
    scores, groups = torch.full((7,), 0.1), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    mask = torch.tensor([[1, 1]] * 3 + [[1, 0]] * 4)
    assert of_groups(getattr(advantages, name), scores, mask, groups).tolist() == [[0.0, 0.0]] * 7


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "pass_at_k", "reinforce_plus_plus_baseline"])
def test_nothing_to_estimate_is_an_error_that_says_so(name):
    estimator = getattr(advantages, name)
    with pytest.raises(NumericsError, match="all tokens are masked"):
        of_groups(estimator, SCORES[:5], torch.zeros(5, 3), GROUPS[:5])
    with pytest.raises(NumericsError, match="the batch is empty"):
        of_groups(estimator, torch.zeros(0), torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))
    with pytest.raises(NumericsError, match=r"group_ids must be a vector of integers"):
        of_groups(estimator, SCORES[:5], MASK[:5], GROUPS[:5].float())
    with pytest.raises(NumericsError, match=r"scores must have shape \(6,\)"):
        of_groups(estimator, SCORES[:5], MASK, GROUPS)


def test_one_sequence_of_one_token():
    ones = torch.ones(1, 1)
    assert of_groups(advantages.grpo, torch.tensor([2.0]), ones, torch.tensor([0])).item() == pytest.approx(
        2.0, rel=1e-5
    )
    assert of_groups(advantages.rloo, torch.tensor([2.0]), ones, torch.tensor([0])).item() == 2.0
    assert of_groups(advantages.opo, torch.tensor([2.0]), ones, torch.tensor([0])).item() == 2.0
    assert [x.item() for x in advantages.generalized_advantages(2 * ones, 0.5 * ones, ones, 0.9, 0.9)] == [
        1.5,
        2.0,
    ]
    with pytest.raises(NumericsError, match="one token is unmasked"):
        of_tokens(advantages.reinforce_plus_plus, ones, ones, gamma=1.0)


def test_options_out_of_range():
    ones = torch.ones(1, 1)
    with pytest.raises(ConfigError, match=r"gamma is 1\.1"):
        advantages.generalized_advantages(ones, ones, ones, 1.1, 0.9)
    with pytest.raises(ConfigError, match=r"lam is -0\.1"):
        advantages.generalized_advantages(ones, ones, ones, 1.0, -0.1)
    with pytest.raises(NumericsError, match="T at least 1"):
        advantages.return_to_go(torch.ones(2, 0), torch.ones(2, 0), 1.0)


def test_advantages_carry_no_gradient():
    values = torch.ones(1, 2, requires_grad=True)
    result, returns = advantages.generalized_advantages(torch.ones(1, 2), values, torch.ones(1, 2), 1.0, 1.0)
    assert not result.requires_grad
    assert not returns.requires_grad
