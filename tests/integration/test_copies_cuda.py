"""Prepared copies give the same as copies one by one, and write nowhere else."""

from __future__ import annotations

import pytest
import torch

from paceline.weights.geometry.boxes import Box
from paceline.weights.transport.copies import CopyJob

# Shape of the box, its start in the parameter, shape of the parameter.
BOXES = [
    ((7,), (2,), (9,)),
    ((4096,), (0,), (4096,)),
    ((200, 896), (100, 0), (300, 896)),
    ((287, 512), (3, 128), (290, 700)),
    ((33, 11), (0, 1), (33, 13)),
    ((1, 9472), (5, 0), (6, 18944)),
    ((5, 2, 4), (1, 2, 3), (6, 5, 8)),
    ((4, 5, 8), (1, 0, 0), (6, 5, 8)),
]


def check(device: torch.device, source: torch.dtype, wire: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    params, staged, landed, packing, scattering = [], [], [], [], []
    for shape, begin, full in BOXES:
        box = Box(begin, tuple(b + n for b, n in zip(begin, shape, strict=True))).slices
        param = torch.randn(full, generator=generator).to(source).to(device)
        slot = torch.full((param[box].numel(),), -7.0, dtype=wire, device=device).view(shape)
        target = torch.full(full, -9.0, dtype=wire, device=device)
        params.append((param, box))
        staged.append(slot)
        landed.append(target)
        packing.append((param[box], slot))
        scattering.append((slot, target[box]))
    pack, scatter = CopyJob(packing), CopyJob(scattering)
    pack.warm_up()
    assert all((slot == -7.0).all() for slot in staged), "a warm-up copies nothing"
    pack.run()
    scatter.run()
    for (param, box), slot, target in zip(params, staged, landed, strict=True):
        assert torch.equal(slot, param[box].to(wire))
        expected = torch.full_like(target, -9.0)
        expected[box] = param[box].to(wire)
        assert torch.equal(target, expected)


@pytest.mark.torch
def test_on_the_cpu() -> None:
    check(torch.device("cpu"), torch.float32, torch.bfloat16)


@pytest.mark.torch
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; test_on_the_cpu is the CPU twin")
@pytest.mark.parametrize(
    ("source", "wire"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
    ids=str,
)
def test_on_a_gpu(source: torch.dtype, wire: torch.dtype) -> None:
    check(torch.device("cuda"), source, wire)
