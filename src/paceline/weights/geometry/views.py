"""Describes many views of tensors in columns: hundreds of thousands of torch's views would take seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from paceline.weights.geometry.columns import IntArray, padded

BoolArray = npt.NDArray[np.bool_]

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

ALIGNMENT: Final = 16
"""Bytes that a GPU's thread loads at once if the addresses allow it"""


@dataclass(frozen=True, slots=True, eq=False)
class Views:
    """Describes views of tensors, one per row of the columns.

    Attributes:
        tensor: index of each view's tensor, (views,).
        offset: index of the view's first element in its tensor's storage, (views,).
        shape, stride: extents and strides in elements, (views, dims).
    """

    tensors: Sequence[torch.Tensor]
    tensor: IntArray
    offset: IntArray
    shape: IntArray
    stride: IntArray

    @classmethod
    def of_boxes(
        cls, tensors: Sequence[torch.Tensor], tensor: IntArray, start: IntArray, shape: IntArray
    ) -> Views:
        """Returns views of boxes of tensors; `start` and `shape` may have more dimensions than a tensor."""
        strides = padded([part.stride() for part in tensors], shape.shape[1])
        begins = np.array([part.storage_offset() for part in tensors], dtype=np.int64)
        stride = strides[tensor]
        return cls(tensors, tensor, begins[tensor] + (start * stride).sum(axis=1), shape, stride)

    @classmethod
    def contiguous(cls, tensor: torch.Tensor, at: IntArray, shape: IntArray) -> Views:
        """Returns views of a vector's elements from `at` on, each of its shape, row after row."""
        return cls([tensor], np.zeros_like(at), at + int(tensor.storage_offset()), shape, row_major(shape))

    def __iter__(self) -> Iterator[torch.Tensor]:
        columns = (self.tensor, self.offset, self.shape, self.stride)
        for tensor, offset, shape, stride in zip(*(column.tolist() for column in columns), strict=True):
            yield self.tensors[tensor].as_strided(shape, stride, offset)

    def __getitem__(self, rows: slice | IntArray) -> Views:
        used, tensor = np.unique(self.tensor[rows], return_inverse=True)
        tensors = [self.tensors[number] for number in used.tolist()]
        return Views(tensors, tensor, self.offset[rows], self.shape[rows], self.stride[rows])

    @property
    def are_cuda(self) -> BoolArray:
        """Which views are on a GPU."""
        return np.array([tensor.is_cuda for tensor in self.tensors], dtype=np.bool_)[self.tensor]

    @property
    def dtypes(self) -> IntArray:
        """Index of each view's element type in `_DTYPES`."""
        return np.array([_DTYPES.index(part.dtype) for part in self.tensors], dtype=np.int64)[self.tensor]

    @property
    def item_bytes(self) -> IntArray:
        """Bytes per element of each view."""
        return np.array([tensor.itemsize for tensor in self.tensors], dtype=np.int64)[self.tensor]

    @property
    def addresses(self) -> IntArray:
        """Address of each view's first element."""
        begins = [part.data_ptr() - part.storage_offset() * part.itemsize for part in self.tensors]
        return np.array(begins, dtype=np.int64)[self.tensor] + self.offset * self.item_bytes


def row_major(shape: IntArray) -> IntArray:
    """Returns the strides of contiguous tensors of these shapes, (tensors, dims)."""
    ends = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    return np.concatenate([ends, np.ones_like(shape[:, :1])], axis=1)


class CopyTable(NamedTuple):
    """Copies between matrices in memory, of one source type, one target type, and alike in alignment.

    Attributes:
        is_aligned: whether all rows start at, and have a length of, multiples of `ALIGNMENT` bytes.
        rows: source address, elements between source rows, target address, elements between target rows,
            number of rows, and of columns, (copies, 6).
    """

    source: torch.dtype
    target: torch.dtype
    is_aligned: bool
    rows: IntArray


def copy_tables(source: Views, target: Views) -> tuple[list[CopyTable], BoolArray]:
    """Returns tables of the copies of each view to the one in the same place, and which copies they hold.

    A matrix has the view's first dimension as its rows; a vector is one row. Copies are left out if the
    elements of a row are not contiguous in both views.
    """
    shape, contiguous = source.shape, row_major(source.shape)
    fits = np.ones(len(shape), dtype=np.bool_)
    for views in (source, target):
        fits &= ((shape == 1) | (views.stride == contiguous))[:, 1:].all(axis=1)
    is_vector = (contiguous[:, 0] == 1) & (source.stride[:, 0] == 1) & (target.stride[:, 0] == 1)
    num_rows = np.where(is_vector, 1, shape[:, 0])
    num_columns = np.where(is_vector, shape[:, 0], contiguous[:, 0])
    is_aligned = np.ones_like(fits)
    rows = []
    for views in (source, target):
        step = np.where(num_rows == 1, num_columns, views.stride[:, 0])
        rows += [views.addresses, step]
        for num_bytes in (views.addresses, step * views.item_bytes, num_columns * views.item_bytes):
            is_aligned &= num_bytes % ALIGNMENT == 0
    table = np.stack([*rows, num_rows, num_columns], axis=1)
    kind = (source.dtypes * len(_DTYPES) + target.dtypes) * 2 + is_aligned
    tables = [
        CopyTable(
            source=_DTYPES[number // 2 // len(_DTYPES)],
            target=_DTYPES[number // 2 % len(_DTYPES)],
            is_aligned=number % 2 == 1,
            rows=table[fits & (kind == number)],
        )
        for number in np.unique(kind[fits]).tolist()
    ]
    return tables, fits
