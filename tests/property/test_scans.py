"""Recurrences over positions against the plain loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.algorithms.advantages import generalized_advantages, return_to_go

pytestmark = pytest.mark.torch


def loop(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: list[float]
) -> list[list[float]]:
    """Advantages one token at a time."""
    table = []
    for row, row_lam in enumerate(lam):
        advantage, next_value, backwards = 0.0, 0.0, []
        for t in reversed(range(mask.shape[1])):
            if mask[row, t]:
                value = values[row, t].item()
                delta = rewards[row, t].item() + gamma * next_value - value
                advantage, next_value = delta + gamma * row_lam * advantage, value
            backwards.append(advantage)
        table.append(backwards[::-1])
    return table


@given(
    seed=st.integers(0, 1000),
    length=st.integers(1, 70),
    density=st.floats(0, 1),
    gamma=st.sampled_from([0.0, 0.9, 0.999, 1.0]),
    lam=st.lists(st.floats(0, 1), min_size=3, max_size=3),
)
def test_gae_is_the_loop(seed: int, length: int, density: float, gamma: float, lam: list[float]) -> None:
    draw = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(3, length, generator=draw) for _ in range(2))
    mask = torch.rand(3, length, generator=draw) < density
    rewards[~mask] = values[~mask] = torch.nan
    advantages, returns = generalized_advantages(rewards, values, mask, gamma, torch.tensor(lam))
    expected = torch.tensor(loop(rewards, values, mask, gamma, lam))
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns[mask], (advantages + values)[mask])


@given(seed=st.integers(0, 1000), length=st.integers(1, 70), gamma=st.sampled_from([0.0, 0.9, 1.0]))
def test_return_to_go_is_gae_without_values(seed: int, length: int, gamma: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    rewards = torch.randn(3, length, generator=draw)
    mask = torch.rand(3, length, generator=draw) < 0.6
    nothing = torch.zeros_like(rewards)
    expected = torch.tensor(loop(rewards, nothing, mask, gamma, [1.0] * 3))
    torch.testing.assert_close(return_to_go(rewards, mask, gamma), expected, rtol=1e-5, atol=1e-5)


def test_a_sequence_of_32_thousand_tokens_keeps_its_precision() -> None:
    ones = torch.ones(1, 32768)
    assert return_to_go(ones, ones, 1.0)[0, 0] == 32768
    geometric = (1 - 0.9999**32768) / (1 - 0.9999)
    assert return_to_go(ones, ones, 0.9999)[0, 0].item() == pytest.approx(geometric, rel=1e-6)
