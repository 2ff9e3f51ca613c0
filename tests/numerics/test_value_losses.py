"""The clipped value loss."""

from __future__ import annotations

import pytest
import torch

from paceline.algorithms.value_losses import clipped_value_loss
from paceline.core.errors import ConfigError

pytestmark = pytest.mark.torch


def test_hand_worked():
    values = torch.tensor([[1.0, 1.0, 0.2, float("nan")]], requires_grad=True)
    loss, metrics = clipped_value_loss(
        values, torch.zeros(1, 4), torch.tensor([[2.0, 0.0, 1.0, 0.0]]), torch.tensor([[1, 1, 1, 0]]), 0.5
    )
    loss.sum().backward()
    # The first is held back (1.5^2 against 1^2), the second is not (0.5^2 against 1^2), the third lies
    # within the clip.
    assert loss.tolist()[0] == pytest.approx([1.125, 0.5, 0.32, 0.0])
    assert values.grad.tolist()[0] == pytest.approx([0.0, 1.0, -0.8, 0.0])
    assert metrics["vf_clipfrac"].item() == pytest.approx(1 / 3)


def test_gradcheck():
    torch.manual_seed(1)
    values, old, returns = (torch.randn(3, 4, dtype=torch.float64) for _ in range(3))
    values.requires_grad_()
    mask = torch.rand(3, 4) > 0.3
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, old, returns, mask, 0.3)[0], (values,))


def test_clip_must_be_positive():
    with pytest.raises(ConfigError, match="clip is 0; it must be a finite number above 0"):
        clipped_value_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), 0.0)
