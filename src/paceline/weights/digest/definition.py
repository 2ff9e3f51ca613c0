"""Digests of weights that add up: of disjoint parts to that of the whole, whatever the sharding.

Definition. Let bits(r, c) be the bit pattern of the element at row r (index in dimension 0) and column c (flat
index in the other dimensions) of the GLOBAL tensor, in the wire dtype, read as a signed integer of its width.
Then, modulo 2^64,

    digest(box of tensor) = S(name) * sum over the box of  R(r) * K(c) * bits(r, c)

with R and K odd 64-bit hashes (splitmix64) of the index and S an odd hash of the tensor's name. (r, c) is the
element's global flat index, split, so a part's digest does not depend on who holds it or on how it lies in
memory; digests of disjoint parts add up. Odd factors are invertible, so any change of a single element changes
the digest for certain; permuted, shifted or swapped rows, columns and layers change it but for a chance of
about 2^-60. It protects against faults, not against an attacker.

What is compared after a push. Cut every tensor along all borders of all rollout ranks' boxes: the parts are its
*atoms* (`digest_atoms`). Each learner rank adds up its share of every atom over its own shard, in one pass, and
the shares are summed over learner ranks: the learner side knows every atom, each element counted once. Every
rollout rank reports the digest of each of its boxes as they lie in its live parameters. A box is a union of
atoms, so `disagreement` checks it against the sum of the learner's atoms inside it: every byte on every rank is
verified, replicated ones on each replica. The digest of the whole policy (`model_digest`) is the sum over
tensors; from the learner's atoms every element enters once; from the reports of one rollout server (all its TP
ranks) equal boxes enter once, so both sides name the same 64 bits without another pass.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from paceline.weights.geometry.boxes import Box

if TYPE_CHECKING:
    import torch

MASK: Final = (1 << 64) - 1
_ROW_SEED: Final = 0x5061_6365_6C69_6E65
_COLUMN_SEED: Final = 0x7765_6967_6874_7321
_GOLDEN: Final = 0x9E37_79B9_7F4A_7C15
_CHUNK: Final = 1 << 17
"""Elements handled at a time on the CPU: their 64-bit copies stay in cache"""


def name_factor(name: str) -> int:
    """S(name): odd, 64 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1


def row_factors(first: int, last: int) -> npt.NDArray[np.uint64]:
    """R(r) for first <= r < last."""
    return _splitmix64(np.arange(first, last, dtype=np.uint64) + np.uint64(_ROW_SEED))


def column_factors(global_shape: tuple[int, ...], box: Box) -> npt.NDArray[np.uint64]:
    """K(c) for the columns of a box, in the shape of its trailing dimensions (flattened)."""
    return _column_factors(global_shape[1:], box.start[1:], box.stop[1:])


@lru_cache(maxsize=256)
def _column_factors(
    shape: tuple[int, ...], start: tuple[int, ...], stop: tuple[int, ...]
) -> npt.NDArray[np.uint64]:
    flat = np.zeros((), dtype=np.uint64)
    for extent, low, high in zip(shape, start, stop, strict=True):
        index = np.arange(low, high, dtype=np.uint64)
        flat = flat[..., None] * np.uint64(extent) + index
    return _splitmix64(flat.reshape(-1) + np.uint64(_COLUMN_SEED))


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Steele, Lea and Flood 2014, the finaliser of SplitMix64, made odd."""
    x = x * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def digest_array(name: str, global_shape: tuple[int, ...], box: Box, values: npt.NDArray[Any]) -> int:
    """The reference: digest of the elements of `box`, given as an array of the box's shape.

    `values` has an element type of 2 or 4 bytes; bfloat16, which numpy lacks, comes as its int16 patterns.
    """
    if values.shape != box.shape:
        raise ValueError(f"{name}: values of shape {values.shape} for a box of shape {box.shape}")
    bits = np.ascontiguousarray(values).view(np.dtype(f"i{values.dtype.itemsize}")).astype(np.int64)
    rows = bits.view(np.uint64).reshape(box.shape[0], -1)
    sums = (rows * column_factors(global_shape, box)).sum(axis=1, dtype=np.uint64)
    total = (sums * row_factors(box.start[0], box.stop[0])).sum(dtype=np.uint64)
    return int(total) * name_factor(name) & MASK


class TensorDigester:
    """`digest_array` for torch tensors on any device, bit for bit; keeps the factor tables on the device.

    Integer arithmetic in torch wraps around, so int64 stands for the integers modulo 2^64. Nothing is copied
    to the host: `add` returns a zero-dimensional int64 tensor, `finish` reads many of them at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tables: dict[object, torch.Tensor] = {}

    def factors(self, global_shape: tuple[int, ...], box: Box) -> tuple[torch.Tensor, torch.Tensor]:
        """R of the box's rows and K of its columns, int64 on the device."""
        return self._row_table(box.stop[0])[box.start[0] : box.stop[0]], self._column_table(global_shape, box)

    def add(
        self, name: str, global_shape: tuple[int, ...], box: Box, values: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Digest of `values` (of the box's shape, any strides) after a cast to `dtype`.

        The cast happens chunk by chunk, as in packing, so that no copy of the whole is made.
        """
        import torch

        if tuple(values.shape) != box.shape:
            raise ValueError(f"{name}: values of shape {tuple(values.shape)} for a box of shape {box.shape}")
        pattern = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        rows, columns = self.factors(global_shape, box)
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        chunk = _CHUNK if self.device.type == "cpu" else _CHUNK << 9
        step = max(1, chunk // max(1, columns.numel()))
        for first in range(0, box.shape[0], step):
            part = values[first : first + step].to(dtype).view(pattern)
            bits = part.reshape(part.shape[0], -1).to(torch.int64)
            total += (bits.mul_(columns).sum(dim=1) * rows[first : first + step]).sum()
        return total * (signed(name_factor(name)))

    def finish(self, totals: list[torch.Tensor]) -> list[int]:
        """The digests as integers in 0..2^64-1, in one transfer to the host."""
        import torch

        return self.read(torch.stack(totals)) if totals else []

    @staticmethod
    def read(totals: torch.Tensor) -> list[int]:
        """The same of one int64 vector."""
        return [value & MASK for value in totals.tolist()]

    @staticmethod
    def read_array(totals: torch.Tensor) -> npt.NDArray[np.uint64]:
        """The same as an array."""
        array: npt.NDArray[np.uint64] = totals.cpu().numpy().view(np.uint64)
        return array

    def _column_table(self, global_shape: tuple[int, ...], box: Box) -> torch.Tensor:
        key = (global_shape[1:], box.start[1:], box.stop[1:])
        if key not in self._tables:
            self._tables[key] = self._upload(column_factors(global_shape, box))
        return self._tables[key]

    def _row_table(self, num_rows: int) -> torch.Tensor:
        table = self._tables.get("rows")
        if table is None or table.numel() < num_rows:
            table = self._tables["rows"] = self._upload(row_factors(0, num_rows))
        return table

    def _upload(self, table: npt.NDArray[np.uint64]) -> torch.Tensor:
        import torch

        return torch.from_numpy(table.view(np.int64).copy()).to(self.device)


def signed(value: int) -> int:
    """The int64 that has the same bits as this unsigned one."""
    return value - (1 << 64) if value >> 63 else value
