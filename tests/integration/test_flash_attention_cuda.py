"""Attention kernels on a GPU give what attention in float64 gives, and so do gradients of shared prompts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from paceline.learner.batch.row_index import RowIndex
from paceline.learner.batch.types import PackedSequences
from paceline.learner.model.decoder import attention, flash_attention
from paceline.learner.model.decoder.rows import take_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KERNELS: list[flash_attention.AttentionKernel] = ["torch", "auto"]
LENGTHS, PREFIXES = [70, 33, 130, 5, 1], [None, 0, 0, None, 3]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Iterator[flash_attention.AttentionKernel]:
    """Chosen for the test."""
    flash_attention.choose(request.param)
    yield request.param
    flash_attention.choose("auto")


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).bfloat16()


@pytest.mark.parametrize(
    ("num_heads", "num_groups", "width", "value_width", "window", "softcap"),
    [
        (28, 4, 128, 128, None, None),
        (9, 3, 64, 64, None, None),
        (4, 4, 192, 128, None, None),
        (8, 1, 256, 256, None, None),
        (8, 4, 128, 128, 40, None),
        (8, 4, 128, 128, 40, 2.0),
        (8, 4, 256, 256, None, 2.0),
    ],
    ids=["Qwen2.5-7B", "SmolLM2", "latent", "Gemma", "windows", "windows and softcap", "Gemma 2"],
)
@pytest.mark.usefixtures("kernel")
def test_values_and_gradients_are_those_of_float64(
    num_heads: int, num_groups: int, width: int, value_width: int, window: int | None, softcap: float | None
) -> None:
    total = sum(LENGTHS)
    shapes = [
        (1, num_heads, total, width),
        (1, num_groups, total, width),
        (1, num_groups, total, value_width),
    ]
    drawn = [draw(shape, seed) for seed, shape in enumerate(shapes)]
    gradient = draw((1, total, num_heads, value_width), 3)
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        packed = PackedSequences.of(LENGTHS, torch.device(device), PREFIXES)
        inputs = [x.to(device, dtype).requires_grad_() for x in drawn]
        module = torch.nn.Identity()
        out, _ = attention.packed_attention(
            module, *inputs, None, packed=packed, sliding_window=window, softcap=softcap
        )
        results.append([out, *torch.autograd.grad(out, inputs, gradient.to(device, dtype))])
    for true, own in zip(*results, strict=True):
        own = own.cpu().double()
        assert own.shape == true.shape
        assert (own - true).norm() / true.norm() < 0.01


@pytest.mark.skipif(not flash_attention._is_installed(), reason="needs the package flash-attn-4")
def test_auto_takes_flash_attention_4_where_it_works() -> None:
    kind = flash_attention.Kind(
        heads=28,
        groups=4,
        width=128,
        value_width=128,
        windowed=False,
        dtype=torch.bfloat16,
        device=torch.device("cuda", 0),
    )
    assert 0.0 < flash_attention._difference(kind) < flash_attention.TOLERANCE / 2
    assert flash_attention._kernel_of(kind, "auto") is flash_attention.by_flash_attention_4
    assert flash_attention._kernel_of(kind, "torch") is flash_attention.by_torch


def test_recomputed_layers_try_a_kernel_once() -> None:
    flash_attention._kernel_of.cache_clear()
    packed = PackedSequences.of([64, 40], torch.device("cuda"))

    def layer(x: Tensor) -> Tensor:
        heads = x.view(1, 4, 104, 64)
        return attention.packed_attention(torch.nn.Identity(), heads, heads, heads, None, packed=packed)[0]

    x = draw((4, 104, 64), 0).cuda().requires_grad_()
    recomputed = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    assert isinstance(recomputed, Tensor)
    (gradient,) = torch.autograd.grad(recomputed.float().square().sum(), x)
    (expected,) = torch.autograd.grad(layer(x).float().square().sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(50, 4, 128), (50, 3), (50, 4096)])
def test_gradients_of_rows_are_summed_in_float32_and_in_order(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    index = torch.randint(
        49, (300,), generator=torch.Generator().manual_seed(0)
    ).cuda()  # row 49 is not taken
    gradient = draw((300, *shape[1:]), 1).to("cuda", dtype)
    rows = torch.zeros(shape, dtype=dtype, device="cuda", requires_grad=True)
    row_index = RowIndex.of(index, shape[0])
    (own,) = torch.autograd.grad(take_rows(rows, row_index), rows, gradient)
    (again,) = torch.autograd.grad(take_rows(rows, row_index), rows, gradient)
    assert torch.equal(own, again)
    true = torch.zeros(shape, dtype=torch.float64, device="cuda").index_add_(0, index, gradient.double())
    rounding = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2**-8, "atol": 1e-6}
    torch.testing.assert_close(own.double(), true, **rounding)  # type: ignore[arg-type]
    assert own[-1].abs().max() == 0.0
