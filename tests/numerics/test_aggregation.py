"""From per-token losses to one number, whole and in parts."""

from __future__ import annotations

import pytest
import torch

from paceline.algorithms.aggregation import MODES, aggregate
from paceline.core.errors import ConfigError, NumericsError

pytestmark = pytest.mark.torch

NAN = float("nan")
LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, NAN]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "constant", "expected"),
    [
        ("token-mean", None, 10 / 4),
        ("seq-mean-token-sum", None, (6 + 4) / 2),
        ("seq-mean-token-mean", None, (2 + 4) / 2),
        ("seq-mean-token-sum-norm", 4.0, (6 + 4) / 2 / 4),
        ("seq-mean-token-sum-norm", None, (6 + 4) / 2 / 3),
    ],
)
def test_hand_worked(mode, constant, expected):
    assert aggregate(LOSS, MASK, mode, constant=constant).item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
def test_rows_and_columns_of_padding_change_nothing(mode):
    loss = torch.nn.functional.pad(LOSS, (0, 4, 0, 3), value=NAN)
    mask = torch.nn.functional.pad(MASK, (0, 4, 0, 3))
    assert aggregate(loss, mask, mode, constant=5.0).item() == pytest.approx(
        aggregate(LOSS, MASK, mode, constant=5.0).item()
    )


@pytest.mark.parametrize("mode", MODES)
def test_given_denominators_replace_those_of_the_mask(mode):
    doubled = aggregate(LOSS, MASK, mode, num_tokens=8, num_sequences=torch.tensor(4), constant=5.0)
    assert doubled.item() == pytest.approx(aggregate(LOSS, MASK, mode, constant=5.0).item() / 2)


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_part_gives_zero_with_zero_gradient_and_an_empty_whole_is_an_error(mode):
    loss = torch.full((2, 3), NAN, requires_grad=True)
    part = aggregate(loss, torch.zeros(2, 3), mode, num_tokens=7, num_sequences=2)
    part.backward()
    assert part.item() == 0.0
    assert loss.grad.tolist() == [[0.0] * 3] * 2
    with pytest.raises(NumericsError, match="all tokens are masked"):
        aggregate(loss, torch.zeros(2, 3), mode)


def test_wrong_arguments_say_what_is_allowed():
    with pytest.raises(
        ConfigError, match="'mean' is not known; choose one of token-mean, seq-mean-token-sum"
    ):
        aggregate(LOSS, MASK, "mean")
    with pytest.raises(ConfigError, match="must be above 0"):
        aggregate(LOSS, MASK, "seq-mean-token-sum-norm", constant=0.0)
    with pytest.raises(NumericsError, match="num_tokens is 0"):
        aggregate(LOSS, MASK, "token-mean", num_tokens=0)
    with pytest.raises(NumericsError, match="same shape"):
        aggregate(LOSS, MASK[:, :2], "token-mean")


@pytest.mark.parametrize("mode", MODES)
def test_gradient(mode):
    loss = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: aggregate(x, MASK, mode), (loss,))
