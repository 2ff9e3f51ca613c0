"""Prepared copies give the same as copies one by one, and write nowhere else."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.columns import padded
from paceline.weights.geometry.views import Views, copy_tables
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


def views_of(device: torch.device, source: torch.dtype, wire: torch.dtype) -> tuple[Views, Views, Views]:
    """Random parameters, one staging vector, and as many empty targets: the views of all boxes in each."""
    generator = torch.Generator().manual_seed(3)
    params = [torch.randn(full, generator=generator).to(source).to(device) for _, _, full in BOXES]
    targets = [torch.full(full, -9.0, dtype=wire, device=device) for _, _, full in BOXES]
    start, shape = padded([begin for _, begin, _ in BOXES], 3), padded([shape for shape, _, _ in BOXES], 3, 1)
    # Staging begins within its storage, as a slot of shared memory does.
    volumes = -(-shape.prod(axis=1) // 8) * 8
    slot = torch.full((int(volumes.sum()) + 8,), -7.0, dtype=wire, device=device)[8:]
    staged = Views.contiguous(slot, np.cumsum(volumes) - volumes, shape)
    numbers = np.arange(len(BOXES))
    return (
        Views.of_boxes(params, numbers, start, shape),
        staged,
        Views.of_boxes(targets, numbers, start, shape),
    )


def check_copied(params: Views, staged: Views, targets: Views) -> None:
    wire = staged.tensors[0].dtype
    for (shape, begin, _), param, target, slot in zip(
        BOXES, params.tensors, targets.tensors, staged, strict=True
    ):
        box = Box(begin, tuple(b + n for b, n in zip(begin, shape, strict=True))).slices
        assert torch.equal(slot.flatten(), param[box].to(wire).flatten())
        expected = torch.full_like(target, -9.0)
        expected[box] = param[box].to(wire)
        assert torch.equal(target, expected)


def check(device: torch.device, source: torch.dtype, wire: torch.dtype) -> None:
    params, staged, targets = views_of(device, source, wire)
    pack, scatter = CopyJob(params, staged), CopyJob(staged, targets)
    pack.warm_up()
    assert all((slot == -7.0).all() for slot in staged), "a warm-up copies nothing"
    pack.run()
    scatter.run()
    check_copied(params, staged, targets)


@pytest.mark.torch
def test_the_tables_of_the_kernel_say_what_to_copy() -> None:
    """Read on the CPU as the kernel reads them; what they leave out is copied view by view."""
    params, staged, targets = views_of(torch.device("cpu"), torch.float32, torch.float32)
    for source, target in ((params, staged), (staged, targets)):
        tables, fits = copy_tables(source, target)
        assert np.flatnonzero(~fits).tolist() == [6], "the rows of one box are in pieces"
        assert [(table.is_aligned, len(table.rows)) for table in tables] == [(False, 2), (True, 5)]
        for table in tables:
            for address, step, to, to_step, rows, columns in table.rows.tolist():
                if table.is_aligned:
                    assert not any(4 * number % 16 for number in (step, to_step, columns))
                    assert not address % 16
                    assert not to % 16
                for row in range(rows):
                    ctypes.memmove(to + 4 * row * to_step, address + 4 * row * step, 4 * columns)
        CopyJob(source[np.flatnonzero(~fits)], target[np.flatnonzero(~fits)]).run()
    check_copied(params, staged, targets)


@pytest.mark.torch
def test_the_tables_are_by_types() -> None:
    """A float32 parameter beside bfloat16 ones has a table of its own."""
    tensors = [torch.zeros(16, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.bfloat16)]
    start, shape = np.zeros((3, 1), np.int64), np.full((3, 1), 16)
    params = Views.of_boxes(tensors, np.arange(3), start, shape)
    staged = Views.contiguous(torch.zeros(48, dtype=torch.bfloat16), 16 * np.arange(3), shape)
    tables, fits = copy_tables(staged, params)
    assert fits.all()
    assert {(table.source, table.target): table.rows[:, 2].tolist() for table in tables} == {
        (torch.bfloat16, torch.bfloat16): [tensors[0].data_ptr(), tensors[2].data_ptr()],
        (torch.bfloat16, torch.float32): [tensors[1].data_ptr()],
    }


@pytest.mark.torch
def test_a_table_is_aligned_only_if_its_columns_are_and_a_column_is_no_vector() -> None:
    """Rows of 3 in rows of 4, and one column of a matrix beside a vector."""
    matrices = [torch.arange(24.0).view(6, 4), torch.zeros(6, 4)]
    rows, columns = (
        [
            Views.of_boxes([part], np.zeros(1, np.int64), np.zeros((1, 2), np.int64), shape)
            for part in matrices
        ]
        for shape in (np.array([[6, 3]]), np.array([[6, 1]]))
    )
    ((table,), _) = copy_tables(*rows)
    assert not table.is_aligned
    vector = Views.contiguous(torch.zeros(6), np.zeros(1, np.int64), np.array([[6, 1]]))
    for target in (columns[1], vector):
        ((table,), _) = copy_tables(columns[0], target)
        assert table.rows[0, [1, 3, 4, 5]].tolist() == [4, int(target.stride[0, 0]), 6, 1]
    ((table,), _) = copy_tables(vector, columns[1])
    assert table.rows[0, [1, 3, 4, 5]].tolist() == [1, 4, 6, 1]


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
