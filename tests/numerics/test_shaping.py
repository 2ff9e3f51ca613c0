"""Overlong penalty, degenerate groups, resampling."""

from __future__ import annotations

import pytest
import torch

from paceline.algorithms import shaping
from paceline.core.errors import ConfigError, NumericsError

pytestmark = pytest.mark.torch


def test_overlong_penalty_grows_over_the_buffer():
    lengths = torch.tensor([1, 80, 85, 90, 100])
    assert shaping.overlong_penalty(lengths, 100, 20).tolist() == pytest.approx([0, 0, -0.25, -0.5, -1.0])
    assert shaping.overlong_penalty(lengths, 100, 20, 0.4).tolist() == pytest.approx([0, 0, -0.1, -0.2, -0.4])
    with pytest.raises(ConfigError, match=r"buffer_length is 101; .* at most 100"):
        shaping.overlong_penalty(lengths, 100, 101)


def test_pow_draws_by_the_size_of_the_score():
    scores = torch.tensor([0.0, 1.0, -2.0, 3.0])
    generator = torch.Generator().manual_seed(0)
    drawn = shaping.resample_indices(scores, "pow", 2.0, num_samples=14000, generator=generator)
    shares = torch.bincount(drawn, minlength=4) / 14000
    assert shares[0] == 0
    assert shares[1:].tolist() == pytest.approx([1 / 14, 4 / 14, 9 / 14], abs=0.02)
    again = shaping.resample_indices(
        scores, "pow", 2.0, num_samples=14000, generator=torch.Generator().manual_seed(0)
    )
    assert torch.equal(drawn, again)


def test_pow_of_zeros_and_of_huge_scores():
    even = shaping.resample_indices(
        torch.zeros(3), generator=torch.Generator().manual_seed(0), num_samples=300
    )
    assert torch.bincount(even, minlength=3).min() > 70
    huge = shaping.resample_indices(torch.tensor([1e30, 1.0]), power=20.0)
    assert huge.tolist() == [0, 0]


def test_max_min_keeps_best_and_worst_of_the_batch_or_of_each_group():
    scores = torch.tensor([1.0, 2.0, 3.0, 5.0, 6.0, 7.0])
    batch = shaping.resample_indices(scores, "max_min", num_samples=100)
    assert set(batch.tolist()) == {0, 5}
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    by_group = shaping.resample_indices(scores, "max_min", group_ids=groups, num_samples=200)
    assert set(by_group.tolist()) == {0, 2, 3, 5}
    assert shaping.resample_indices(scores, "max_min").shape == (6,)


def test_resampling_refuses_what_it_cannot_do():
    with pytest.raises(ConfigError, match="'best' is not known; choose one of pow, max_min"):
        shaping.resample_indices(torch.ones(2), "best")
    with pytest.raises(NumericsError, match="all finite"):
        shaping.resample_indices(torch.tensor([1.0, float("nan")]))
    with pytest.raises(NumericsError, match="at least one score"):
        shaping.resample_indices(torch.ones(0))
