"""Averages in 8 bits: how near they are, whatever rows a rank has, and that training with them learns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.learner.train.state import compact_averages
from paceline.learner.train.state.compact_averages import (
    CODES,
    SCALES,
    compact_forms,
    compacted,
    dynamic_map,
    expanded,
    step_compact,
)
from paceline.sizing.memory.learner_memory import COMPACT_STEP

pytestmark = pytest.mark.torch

GROUP = {"betas": (0.9, 0.999), "lr": 0.01, "weight_decay": 0.1, "eps": 1e-8}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Numbers over several decades, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator) * 10 ** (2 * torch.randn(shape, generator=generator))
    return torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, numbers)


def empty_state(parameter: Tensor) -> dict[str, Tensor]:
    return {
        name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in compact_forms(parameter).items()
    }


def test_the_maps_are_those_of_the_paper() -> None:
    signed, unsigned = dynamic_map(True), dynamic_map(False)
    for values in (signed, unsigned):
        assert (len(values), values[-1].item(), int((values == 0).sum())) == (256, 1.0, 1)
        assert bool((values.diff() > 0).all())
    assert torch.equal(signed[:127], -signed[128:255].flip(0))
    # The decade below 1 has 64 parts with a sign, else 128; the lowest one and two.
    assert (int((signed > 0.1).sum()), int((unsigned > 0.1).sum())) == (65, 129)
    torch.testing.assert_close(signed[128].item(), 0.55e-6, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(unsigned[1:3], torch.tensor([0.325e-6, 0.775e-6]), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("columns", [1, 255, 256, 600])
@pytest.mark.parametrize("signed", [True, False])
def test_a_number_becomes_the_nearest_value_of_its_block(columns: int, signed: bool) -> None:
    average = drawn(5, columns)
    average = average if signed else average**2
    codes, scales = compacted(average, signed=signed)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, (5, columns), (5, -(-columns // 256)))
    back = expanded(codes, scales, signed=signed)
    for begin in range(0, columns, 256):
        block, own = average[:, begin : begin + 256], back[:, begin : begin + 256]
        largest = block.abs().amax(dim=1, keepdim=True)
        values = dynamic_map(signed) * largest[..., None]
        nearest = (values - block[..., None]).abs().amin(dim=-1)
        if not signed:  # what would become 0 has the least value instead
            least = (values[..., 1] - block).abs()
            positive = (block > 0) & (block < values[..., 1])
            nearest = torch.where(positive, least, nearest)
        torch.testing.assert_close((own - block).abs(), nearest, rtol=1e-4, atol=1e-6 * float(largest.max()))
    if not signed:
        assert torch.equal(back > 0, average > 0)


def test_zeros_stay_zeros_and_a_block_keeps_out_of_the_others() -> None:
    average = torch.zeros(2, 512)
    average[0, 0], average[1, 511] = 1e3, 1e-9
    codes, scales = compacted(average, signed=True)
    torch.testing.assert_close(expanded(codes, scales, signed=True), average, rtol=1e-6, atol=0.0)
    assert dynamic_map(True)[codes[0, 256:].int()].abs().max() == 0


def test_codes_of_rows_do_not_depend_on_the_rows_beside_them() -> None:
    average = drawn(7, 3, 300)
    codes, scales = compacted(average, signed=True)
    own_codes, own_scales = compacted(average[2:5], signed=True)
    assert torch.equal(own_codes, codes[2:5])
    assert torch.equal(own_scales, scales[2:5])


@pytest.mark.parametrize("size", [1, 700, 1 << 20])
def test_a_step_is_adamws_on_the_expanded_averages_in_slices_of_any_size(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compact_averages, "SLICE", size)
    ours = drawn(9, 300, seed=1)
    theirs = torch.nn.Parameter(ours.clone())
    library = torch.optim.AdamW([theirs], **GROUP)  # type: ignore[arg-type]
    state, step = empty_state(ours), torch.zeros(())
    averages = [torch.zeros_like(ours), torch.zeros_like(ours)]
    for seed in range(2, 6):
        gradient = torch.randn(9, 300, generator=torch.Generator().manual_seed(seed))
        step_compact(ours, gradient, state, step, GROUP)
        library.state[theirs] = {
            "step": torch.tensor(float(seed - 2)),
            "exp_avg": averages[0],
            "exp_avg_sq": averages[1],
        }
        theirs.grad = gradient.clone()
        library.step()
        averages = [
            expanded(*compacted(library.state[theirs][name], signed=signed), signed=signed)
            for name, signed in (("exp_avg", True), ("exp_avg_sq", False))
        ]
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-5)
        for average, codes, scales, signed in zip(averages, CODES, SCALES, (True, False), strict=True):
            kept = expanded(state[codes], state[scales], signed=signed)
            torch.testing.assert_close(kept, average, rtol=0.1, atol=1e-4)
    assert step.item() == 4


def test_a_regression_is_learned_as_with_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    target, inputs = torch.randn(40, 300, generator=generator), torch.randn(64, 300, generator=generator)

    def loss_of(weights: Tensor) -> Tensor:
        return ((inputs @ (weights - target).T) ** 2).mean()

    group = {**GROUP, "weight_decay": 0.0}
    start = torch.randn(40, 300, generator=generator)
    exact = torch.nn.Parameter(start.clone())
    library = torch.optim.AdamW([exact], **group)  # type: ignore[arg-type]
    ours, step = torch.nn.Parameter(start.clone()), torch.zeros(())
    state = empty_state(ours)
    for _ in range(300):
        library.zero_grad()
        loss_of(exact).backward()
        library.step()
        ours.grad = None
        loss_of(ours).backward()
        assert ours.grad is not None
        with torch.no_grad():
            step_compact(ours.data, ours.grad, state, step, group)
    begin, float32, compact = (loss_of(weights).item() for weights in (start, exact, ours))
    assert float32 < begin / 50
    assert compact < 1.5 * float32 + begin / 1000


def test_the_memory_plan_knows_what_a_step_holds() -> None:
    """Two averages, and while one becomes codes up to eight numbers of four bytes for each."""
    assert 40 * compact_averages.SLICE == COMPACT_STEP
