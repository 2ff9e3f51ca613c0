"""Weights for samples of a slightly different sampler."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.algorithms import rollout_correction as correction
from paceline.core.errors import ConfigError, NumericsError

pytestmark = pytest.mark.torch

# Weights 2, 1/2, (masked), 4 and 1, 1, 1/10, (masked).
WEIGHTS = torch.tensor([[2.0, 0.5, math.nan, 4.0], [1.0, 1.0, 0.1, math.nan]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0]])
ROLLOUT = torch.full_like(WEIGHTS, -1.5)
OLD = ROLLOUT + WEIGHTS.log()


def close(got: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_weights_at_each_level():
    close(correction.rollout_weights(OLD, ROLLOUT, MASK), [[2, 0.5, 0, 4], [1, 1, 0.1, 0]])
    close(correction.rollout_weights(OLD, ROLLOUT, MASK, "sequence"), [[4, 4, 0, 4], [0.1, 0.1, 0.1, 0]])
    third, tenth = 4 ** (1 / 3), 0.1 ** (1 / 3)
    torch.testing.assert_close(
        correction.rollout_weights(OLD, ROLLOUT, MASK, "geometric"),
        torch.tensor([[third, third, 0, third], [tenth, tenth, tenth, 0]], dtype=torch.float64),
        rtol=1e-7,
        atol=0,
    )


def test_tis_caps_tokens_or_sequences():
    close(correction.tis(OLD, ROLLOUT, MASK, 2.0), [[2, 0.5, 0, 2], [1, 1, 0.1, 0]])
    close(correction.tis(OLD, ROLLOUT, MASK, 3.0, "sequence"), [[3, 3, 0, 3], [0.1, 0.1, 0.1, 0]])


def test_icepop_drops_what_lies_outside():
    close(correction.icepop(OLD, ROLLOUT, MASK, 0.49, 2.01), [[2, 0.5, 0, 0], [1, 1, 0, 0]])


def test_sequence_mask_drops_whole_sequences():
    close(correction.sequence_mask(OLD, ROLLOUT, MASK, 0.5, 5.0), [[1, 1, 0, 1], [0, 0, 0, 0]])
    close(correction.sequence_mask(OLD, ROLLOUT, MASK, 0.4, 1.5, "geometric"), [[0, 0, 0, 0], [1, 1, 1, 0]])
    close(correction.sequence_mask(OLD, ROLLOUT, MASK, 0.3, 5.0, "token"), [[1, 1, 0, 1], [0, 0, 0, 0]])


def test_weights_are_bounded_and_carry_no_gradient():
    old = torch.tensor([[0.0, -100.0]], requires_grad=True)
    weights = correction.rollout_weights(old, torch.tensor([[-math.inf, -1.0]]), torch.ones(1, 2))
    assert weights.tolist()[0] == pytest.approx([math.exp(20), math.exp(-20)])
    assert not weights.requires_grad


def sample_size(weights: torch.Tensor, mask: torch.Tensor) -> float:
    return correction.effective_sample_size(correction.weight_sums(weights, mask)).item()


def test_metrics():
    weights = correction.rollout_weights(OLD, ROLLOUT, MASK)
    total, squares = 2 + 0.5 + 4 + 1 + 1 + 0.1, 4 + 0.25 + 16 + 1 + 1 + 0.01
    assert sample_size(weights, MASK) == pytest.approx(total**2 / (6 * squares))
    assert sample_size(torch.ones(1, 4), torch.ones(1, 4)) == pytest.approx(1.0)
    assert sample_size(torch.eye(4)[:1], torch.ones(1, 4)) == pytest.approx(0.25)
    assert correction.largest_weight(weights, MASK).item() == pytest.approx(4.0)
    # w - 1 - log w, token by token
    expected_kl = [
        [1 - math.log(2), -0.5 - math.log(0.5), 0, 3 - math.log(4)],
        [0, 0, -0.9 - math.log(0.1), 0],
    ]
    close(correction.mismatch_kl(OLD, ROLLOUT, MASK), expected_kl)
    assert correction.log_prob_diff_max(OLD, ROLLOUT, MASK).item() == pytest.approx(math.log(10))


def test_effective_sample_size_of_parts():
    weights = correction.rollout_weights(OLD, ROLLOUT, MASK)
    sums = sum(correction.weight_sums(weights[row : row + 1], MASK[row : row + 1]) for row in range(2))
    assert correction.effective_sample_size(sums).item() == pytest.approx(sample_size(weights, MASK))
    assert correction.effective_sample_size(torch.zeros(3)).item() == 0.0
    assert sample_size(WEIGHTS, torch.zeros_like(MASK)) == 0.0


def test_wrong_arguments():
    with pytest.raises(ConfigError, match="'word' is not known; choose one of token, sequence, geometric"):
        correction.tis(OLD, ROLLOUT, MASK, 2.0, "word")
    with pytest.raises(ConfigError, match="cap is 0"):
        correction.tis(OLD, ROLLOUT, MASK, 0.0)
    with pytest.raises(ConfigError, match="high is 1; it must be a finite number above 2"):
        correction.icepop(OLD, ROLLOUT, MASK, 2.0, 1.0)
    with pytest.raises(NumericsError, match="same shape"):
        correction.rollout_weights(OLD, ROLLOUT[:1], MASK)
