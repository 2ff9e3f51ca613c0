"""Digests many tensor parts at once; prepared when a group forms and run after every push."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from paceline.weights.digest.definition import MASK, column_factors, name_factor, row_factors, signed
from paceline.weights.geometry.boxes import Box

_CHUNK: Final = 1 << 17
"""Elements handled at a time on the CPU: their 64-bit copies stay in cache"""


class TensorDigester:
    """Digests torch tensors on any device; keeps the factor tables on the device.

    Integer arithmetic in torch wraps around, so int64 represents the integers modulo 2^64. Nothing is copied
    to the host: `add` returns a zero-dimensional int64 tensor, `finish` reads many of them at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tables: dict[object, torch.Tensor] = {}

    def factors(self, global_shape: tuple[int, ...], box: Box) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns R of the box's rows and K of its columns, int64 on the device."""
        return self._row_table(box.stop[0])[box.start[0] : box.stop[0]], self._column_table(global_shape, box)

    def add(
        self,
        name: str,
        global_shape: tuple[int, ...],
        box: Box,
        values: torch.Tensor,
        dtype: torch.dtype,
        *,
        are_received: bool = False,
    ) -> torch.Tensor:
        """Returns the digest of `values` (of the box's shape, any strides) after a cast to `dtype`.

        Casts chunk by chunk, as in packing, so that no full copy is made.

        Args:
            are_received: whether the values were received in `dtype`; then a value that `dtype` cannot hold
                exactly changes the digest.
        """
        if tuple(values.shape) != box.shape:
            raise ValueError(f"{name}: values of shape {tuple(values.shape)} for a box of shape {box.shape}")
        pattern = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        rows, columns = self.factors(global_shape, box)
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        chunk = _CHUNK if self.device.type == "cpu" else _CHUNK << 9
        step = max(1, chunk // max(1, columns.numel()))
        for first in range(0, box.shape[0], step):
            own = values[first : first + step]
            part = own.to(dtype).view(pattern)
            bits = part.reshape(part.shape[0], -1).to(torch.int64)
            if are_received and own.dtype != dtype:
                total += (own.to(dtype).to(own.dtype).view(torch.int32) != own.view(torch.int32)).sum()
            total += (bits.mul_(columns).sum(dim=1) * rows[first : first + step]).sum()
        return total * (signed(name_factor(name)))

    def finish(self, totals: list[torch.Tensor]) -> list[int]:
        """Returns the digests as integers in 0..2^64-1, in one transfer to the host."""
        return [value & MASK for value in torch.stack(totals).tolist()] if totals else []

    @staticmethod
    def read_array(totals: torch.Tensor) -> npt.NDArray[np.uint64]:
        """Returns the digests in an int64 vector, as an array of uint64."""
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
        return torch.from_numpy(table.view(np.int64).copy()).to(self.device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DigestPart:
    """A tensor part whose digest is added to sum number `output`; a sum has parts of one tensor only.

    `values` is a view of the live storage, of the box's shape.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    values: torch.Tensor
    output: int


class DigestJob:
    """Digests the same parts repeatedly: on CUDA in one kernel launch, elsewhere part by part.

    A job keeps addresses, so it is valid only as long as the parts' storage stays where it is.

    Args:
        dtype: element type on the wire, to which values are cast first.
        are_received: as in `TensorDigester.add`.
    """

    def __init__(
        self,
        digester: TensorDigester,
        parts: Sequence[DigestPart],
        num_outputs: int,
        dtype: torch.dtype,
        *,
        are_received: bool = False,
    ) -> None:
        self._digester, self._dtype, self._num_outputs = digester, dtype, num_outputs
        self._are_received = are_received
        self._began, self._ended = 0.0, 0.0
        self._events: tuple[Any, Any] | None = None
        factors = [1] * num_outputs
        for part in parts:
            factors[part.output] = signed(name_factor(part.name))
        self._factors = torch.tensor(factors, dtype=torch.int64).to(digester.device)
        self._kernel: Any = None
        self._rest = list(parts)
        if digester.device.type == "cuda":
            in_kernel = [part for part in parts if not are_received or part.values.dtype == dtype]
            self._rest = [part for part in parts if are_received and part.values.dtype != dtype]
            # Triton exists only where CUDA does.
            from paceline.weights.kernels import DigestKernel

            self._kernel = DigestKernel(
                [
                    (part.values, *digester.factors(part.global_shape, part.box), part.output)
                    for part in in_kernel
                ],
                dtype,
                digester.device,
            )
            self._rest += [in_kernel[index] for index in self._kernel.skipped]
            make: Any = torch.cuda.Event
            self._events = make(enable_timing=True), make(enable_timing=True)

    def run(self) -> torch.Tensor:
        """Returns all sums modulo 2^64: (num_outputs,) int64 on the device, without waiting for it."""
        self._began = time.perf_counter()
        device = self._digester.device
        sums = torch.zeros(self._num_outputs, dtype=torch.int64, device=device)
        if self._events is not None:
            self._events[0].record()
            self._kernel.launch(sums)
            sums *= self._factors
        for part in self._rest:
            sums[part.output] += self._digester.add(
                part.name,
                part.global_shape,
                part.box,
                part.values,
                self._dtype,
                are_received=self._are_received,
            )
        if self._events is not None:
            self._events[1].record()
        self._ended = time.perf_counter()
        return sums

    def warm_up(self) -> None:
        """Compiles the kernel before the first push needs it; that takes a fraction of a second."""
        if self._kernel is not None:
            self.run()

    @property
    def last_ms(self) -> float:
        """Milliseconds of the last finished `run`, measured on the device if there is one."""
        if self._events is None:
            return 1e3 * (self._ended - self._began)
        return float(self._events[0].elapsed_time(self._events[1]))
