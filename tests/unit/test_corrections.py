"""Corrections of routers' scores in parts that bfloat16 holds."""

from __future__ import annotations

import pytest
import torch

from paceline.weights import corrections

pytestmark = pytest.mark.torch


def test_the_parts_add_up_to_the_bit_also_when_each_was_rounded_to_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    mantissas = torch.randn(100_000, generator=generator)
    exponents = torch.randint(-30, 30, mantissas.shape, generator=generator)
    values = torch.cat([torch.ldexp(mantissas, exponents), torch.tensor([0.0, 1.0, -1.0, 1 + 2**-23])])
    parts = corrections.split(values)
    assert parts.shape == (len(values), corrections.NUM_PARTS)
    assert torch.equal(corrections.join(parts), values)
    assert torch.equal(corrections.join(parts.bfloat16()), values)


def test_corrections_are_renamed_and_everything_else_passes() -> None:
    value, weight = torch.tensor([0.1, -3.7]), torch.ones(2)
    tensors = {"gate.weight": weight, "gate.e_score_correction_parts": corrections.split(value)}
    stored = dict(corrections.as_stored(tensors.items()))
    assert stored.keys() == {"gate.weight", "gate.e_score_correction_bias"}
    assert stored["gate.weight"] is weight
    assert torch.equal(stored["gate.e_score_correction_bias"], value)
