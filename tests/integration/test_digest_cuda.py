"""The digest kernel gives the reference's digests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.weights.digest.definition import MASK
from paceline.weights.digest.job import DigestJob, DigestPart, TensorDigester
from paceline.weights.geometry.boxes import Box
from support.reference_digest import digest_array

CASES = [
    # global shape, box, columns of the storage that the box lies in
    ((7,), Box((2,), (7,)), 5),
    ((4096,), Box((0,), (4096,)), 4096),
    ((300, 896), Box((100, 0), (300, 896)), 896),
    ((300, 896), Box((3, 128), (290, 640)), 700),
    ((33, 17), Box((0, 3), (33, 14)), 13),
    ((6, 5, 8), Box((1, 0, 0), (6, 5, 8)), 8),
    ((6, 5, 8), Box((1, 2, 3), (6, 4, 7)), 9),
]


def parts_on(device: torch.device, dtype: torch.dtype) -> list[DigestPart]:
    generator = torch.Generator().manual_seed(7)
    parts = []
    for index, (shape, box, room) in enumerate(CASES):
        storage = torch.randn(*box.shape[:-1], room, generator=generator, dtype=torch.float32)
        values = storage.to(dtype).to(device)[..., : box.shape[-1]]
        parts.append(
            DigestPart(name=f"tensor.{index}", global_shape=shape, box=box, values=values, output=index)
        )
    return parts


def reference(part: DigestPart, wire: torch.dtype) -> int:
    pattern = {2: torch.int16, 4: torch.int32}[wire.itemsize]
    bits = part.values.cpu().to(wire).contiguous().view(pattern).numpy()
    return digest_array(part.name, part.global_shape, part.box, np.asarray(bits))


def assert_digests(device: torch.device, source: torch.dtype, wire: torch.dtype) -> None:
    parts = parts_on(device, source)
    digester = TensorDigester(device)
    job = DigestJob(digester, parts, len(parts), wire)
    expected = [reference(part, wire) for part in parts]
    assert digester.read_array(job.run()).tolist() == expected
    assert digester.read_array(job.run()).tolist() == expected, "a second run"
    assert job.last_ms > 0
    # Two halves of a part, with one output: it is the digest of the part.
    part = parts[2]
    halves = [
        DigestPart(
            name=part.name,
            global_shape=part.global_shape,
            box=box,
            values=part.values[box.relative_to(part.box.start).slices],
            output=0,
        )
        for box in part.box.split(0, 155)
    ]
    total = DigestJob(digester, halves, 1, wire).run()
    assert digester.read_array(total).tolist() == [reference(part, wire) & MASK]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("source", "wire"), [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_a_job_on_the_cpu(source: torch.dtype, wire: torch.dtype) -> None:
    assert_digests(torch.device("cpu"), source, wire)


@pytest.mark.torch
@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device; test_a_job_on_the_cpu is the CPU twin"
)
@pytest.mark.parametrize(
    ("source", "wire"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
    ids=str,
)
def test_a_job_on_a_gpu(source: torch.dtype, wire: torch.dtype) -> None:
    assert_digests(torch.device("cuda"), source, wire)
