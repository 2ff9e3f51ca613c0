"""Masked mean, variance, whitening, and their sums over ranks."""

from __future__ import annotations

import pytest
import torch

from paceline.algorithms import statistics
from paceline.algorithms.checks import require_range
from paceline.core.errors import ConfigError, NumericsError

pytestmark = pytest.mark.torch

X = torch.tensor([[1.0, 2.0], [3.0, float("nan")]])
MASK = torch.tensor([[1, 1], [1, 0]])


def test_mean_var_and_whitening_of_one_two_three():
    assert statistics.masked_mean(X, MASK).item() == pytest.approx(2.0)
    assert statistics.masked_var(X, MASK).item() == pytest.approx(1.0)
    assert statistics.masked_whiten(X, MASK)[MASK.bool()].tolist() == pytest.approx([-1.0, 0.0, 1.0])


def test_mean_along_a_dim_and_of_nothing():
    mask = torch.tensor([[1, 1], [0, 0]])
    assert statistics.masked_mean(X, mask, dim=-1).tolist() == pytest.approx([1.5, 0.0])
    assert statistics.masked_mean(X, mask, dim=0).tolist() == pytest.approx([1.0, 2.0])
    assert statistics.masked_mean(X, torch.zeros_like(MASK)).item() == 0.0


def test_variance_is_unbiased_and_keeps_its_digits_beside_a_large_mean():
    x = torch.tensor([[1e6, 1e6 + 1, 1e6 + 2, 1e6 + 3]])
    assert statistics.masked_var(x, torch.ones_like(x)).item() == pytest.approx(5.0 / 3.0, rel=1e-6)


@pytest.mark.parametrize(("mask", "word"), [([[0, 0], [0, 0]], "no token"), ([[0, 1], [0, 0]], "one token")])
def test_too_few_tokens_for_a_variance_is_an_error_that_says_so(mask, word):
    with pytest.raises(NumericsError, match=word):
        statistics.masked_var(X, torch.tensor(mask))
    with pytest.raises(NumericsError, match=word):
        statistics.masked_whiten(X, torch.tensor(mask))


def test_equal_values_whiten_to_zero():
    whitened = statistics.masked_whiten(torch.full((2, 3), 0.5), torch.ones(2, 3))
    assert whitened.tolist() == [[0.0] * 3] * 2


def test_parts_add_up_to_the_whole():
    torch.manual_seed(0)
    x, mask = torch.randn(6, 5, dtype=torch.float64) + 100, torch.rand(6, 5) > 0.4
    parts = [slice(0, 1), slice(1, 4), slice(4, 6)]
    total, count = sum(statistics.masked_sums(x[part], mask[part]) for part in parts)
    mean = statistics.mean_from_sums(total, count)
    deviation = sum(statistics.masked_squared_deviation(x[part], mask[part], mean) for part in parts)
    var = statistics.var_from_sums(deviation, count)
    kept = x[mask]
    assert mean.item() == pytest.approx(kept.mean().item())
    assert var.item() == pytest.approx(kept.var().item())
    full = statistics.masked_whiten(x, mask)
    torch.testing.assert_close(statistics.whiten_with(x[1:4], mean, var), full[1:4], rtol=1e-12, atol=1e-12)


def test_half_precision_is_reduced_in_float32_and_float64_stays():
    x = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    mean = statistics.masked_mean(x, torch.ones(1, 4096))
    assert (mean.item(), mean.dtype) == (1.0, torch.float32)
    assert statistics.masked_mean(x.double(), torch.ones(1, 4096)).dtype == torch.float64


def test_gradient_of_whitening():
    x = torch.tensor([[0.3, -1.0, 2.0], [0.7, 0.1, 5.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    assert torch.autograd.gradcheck(lambda t: statistics.masked_whiten(t, mask) * mask, (x,))
    assert torch.autograd.gradcheck(lambda t: statistics.masked_mean(t, mask, dim=-1), (x,))


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(NumericsError, match=r"x \(2, 2\), mask \(2,\)"):
        statistics.masked_mean(X, torch.ones(2))


def test_a_range_error_names_value_and_bounds():
    with pytest.raises(
        ConfigError, match=r"gamma is 1\.5; it must be a finite number at least 0 and at most 1"
    ):
        require_range("gamma", 1.5, at_least=0.0, at_most=1.0)
    with pytest.raises(ConfigError, match="clip is nan"):
        require_range("clip", float("nan"), above=0.0)
