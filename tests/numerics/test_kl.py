"""KL estimates, rewards per token, and the controllers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from paceline.algorithms import kl
from paceline.core.errors import ConfigError, NumericsError

pytestmark = pytest.mark.torch

K3_OF_HALF = math.exp(-0.5) + 0.5 - 1.0


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        ("k1", 0.5, 1.0),
        ("kl", 0.5, 1.0),
        ("abs", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("mse", 0.125, 0.5),
        ("k3", K3_OF_HALF, 1.0 - math.exp(-0.5)),
        ("low_var_kl", K3_OF_HALF, 1.0 - math.exp(-0.5)),
        ("k1+", 0.5, 0.5),
        ("abs+", 0.5, 0.5),
        ("k2+", 0.125, 0.5),
        ("k3+", K3_OF_HALF, 0.5),
        ("low_var_kl+", K3_OF_HALF, 0.5),
    ],
)
def test_value_and_gradient_at_a_difference_of_one_half(kind, value, gradient):
    log_probs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    estimate = kl.kl_estimate(log_probs, torch.tensor([-1.5], dtype=torch.float64), kind)
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(value)
    assert log_probs.grad.item() == pytest.approx(gradient)


def test_k3_is_bounded_and_finite_for_infinite_differences():
    log_probs = torch.tensor([-30.0, 30.0, -math.inf, 3.0], requires_grad=True)
    estimate = kl.kl_estimate(log_probs, torch.zeros(4), "k3")
    estimate.sum().backward()
    assert estimate.tolist() == pytest.approx([10.0, 10.0, 10.0, math.exp(-3) + 2])
    assert log_probs.grad.tolist() == pytest.approx([0.0, 0.0, 0.0, 1 - math.exp(-3)])


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_gradcheck(kind):
    log_probs = torch.tensor([-0.2, -1.0, -3.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-0.5, -0.4, -2.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl.kl_estimate(x, ref, kind), (log_probs,))


def test_unknown_kind_and_wrong_shape():
    with pytest.raises(
        ConfigError, match=r"'k4\+' is not known; choose one of k1, abs, k2, k3, kl, mse, low_var_kl"
    ):
        kl.kl_estimate(torch.zeros(1), torch.zeros(1), "k4+")
    with pytest.raises(NumericsError, match="same shape"):
        kl.kl_estimate(torch.zeros(2), torch.zeros(1), "k1")


def test_score_sits_on_the_last_unmasked_token_and_kl_on_all():
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1]])
    rewards = kl.token_rewards(torch.tensor([2.0, -1.0]), mask, torch.full((2, 4), 0.5), 0.1)
    expected = [[-0.05, 0.0, 1.95, 0.0], [-0.05, -0.05, -0.05, -1.05]]
    torch.testing.assert_close(rewards, torch.tensor(expected))
    torch.testing.assert_close(
        kl.token_rewards(torch.tensor([2.0, -1.0]), mask), torch.tensor([[0.0, 0, 2, 0], [0, 0, 0, -1]])
    )


def test_a_sequence_without_tokens_cannot_carry_a_score():
    with pytest.raises(NumericsError, match=r"sequences \[1\] have no unmasked token"):
        kl.token_rewards(torch.ones(2), torch.tensor([[1, 1], [0, 0]]))


def test_placed_parts_of_a_score_are_on_their_tokens_and_the_rest_on_the_last() -> None:
    """A part under the mask, or on the last token, is part of the rest: a sequence's sum is its score."""
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]])
    placed = torch.tensor([[0.5, 0.0, 9.0, 1.0, 7.0], [0.0, -2.0, 0.0, 0.0, 0.0]])
    rewards = kl.token_rewards(torch.tensor([2.0, 1.0]), mask, placed=placed)
    expected = torch.tensor([[0.5, 0, 0, 1.5, 0], [0, -2.0, 0, 0, 3.0]])
    torch.testing.assert_close(rewards, expected)


def test_penalized_scores_by_hand_and_the_same_under_any_padding() -> None:
    """Ranks pad their rows to different lengths, and samples of a group lie on several ranks."""
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1]])
    table = torch.tensor([[0.5, torch.nan, 1.0, 9.0], [0.5, 0.5, 0.5, 0.5]])
    got = kl.penalized_scores(torch.tensor([2.0, -1.0]), mask, table, 0.1)
    torch.testing.assert_close(got, torch.tensor([1.85, -1.2]))
    scores = torch.tensor([0.1, 1 / 3])
    assert torch.equal(kl.penalized_scores(scores, torch.ones(2, 4)), scores)
    long = torch.randn(64, 37, generator=torch.Generator().manual_seed(0))
    alone = kl.penalized_scores(torch.ones(64), torch.ones(64, 37), long, 0.1)
    for padding in (3, 27, 219, 987):
        padded, kept = F.pad(long, (0, padding)), F.pad(torch.ones(64, 37), (0, padding))
        assert torch.equal(kl.penalized_scores(torch.ones(64), kept, padded, 0.1), alone)


def test_adaptive_controller_moves_by_at_most_a_fifth_of_n_over_horizon():
    controller = kl.AdaptiveKLController(kl_coef=0.1, target_kl=0.02, horizon=100)
    trace = []
    for current_kl in (0.1, 0.01, 0.021):
        controller.update(current_kl, 10)
        trace.append(controller.value)
    assert trace == pytest.approx([0.1 * 1.02, 0.1 * 1.02 * 0.98, 0.1 * 1.02 * 0.98 * 1.005])


def test_controller_state_goes_through_a_checkpoint():
    controller = kl.AdaptiveKLController(kl_coef=0.1, target_kl=0.02, horizon=100)
    controller.update(0.1, 50)
    resumed = kl.AdaptiveKLController(kl_coef=0.1, target_kl=0.02, horizon=100)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.value == controller.value == pytest.approx(0.11)
    fixed = kl.FixedKLController(0.3)
    fixed.update(9.0, 1000)
    assert fixed.value == 0.3
    fixed.load_state_dict({"value": 0.1})  # of an earlier version
    assert fixed.value == 0.3, "a fixed coefficient is configuration"
    resumed.load_state_dict(fixed.state_dict())
    assert resumed.value == controller.value


def test_controller_refuses_nonsense_and_keeps_its_value():
    controller = kl.AdaptiveKLController(kl_coef=0.1, target_kl=0.02, horizon=100)
    for bad in (math.nan, math.inf):
        with pytest.raises(NumericsError, match=r"stays 0\.1"):
            controller.update(bad, 10)
    assert controller.value == 0.1
    with pytest.raises(ConfigError, match="target_kl"):
        kl.AdaptiveKLController(kl_coef=0.1, target_kl=0.0, horizon=100)
