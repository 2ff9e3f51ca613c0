"""Digests of many tensor parts at once, prepared when a group forms and run after every push."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.weights.digest.definition import TensorDigester, name_factor, signed
from paceline.weights.geometry.boxes import Box


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DigestPart:
    """A part of a tensor whose digest enters sum number `output`; all parts of one sum are of one tensor.

    `values` is a view of the live storage, of the box's shape.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    values: torch.Tensor
    output: int


class DigestJob:
    """Digests the same parts again and again: on CUDA in one kernel launch, elsewhere part by part.

    It keeps addresses, so it is only good as long as the parts' storage stays where it is.
    """

    def __init__(
        self, digester: TensorDigester, parts: Sequence[DigestPart], num_outputs: int, dtype: torch.dtype
    ) -> None:
        self._digester, self._dtype, self._num_outputs = digester, dtype, num_outputs
        self._began, self._ended = 0.0, 0.0
        self._events: tuple[Any, Any] | None = None
        factors = [1] * num_outputs
        for part in parts:
            factors[part.output] = signed(name_factor(part.name))
        self._factors = torch.tensor(factors, dtype=torch.int64).to(digester.device)
        self._kernel: Any = None
        self._rest = list(parts)
        if digester.device.type == "cuda":
            from paceline.weights.digest.kernel import DigestKernel, fits

            self._kernel = DigestKernel(digester, [part for part in parts if fits(part)], dtype)
            self._rest = [part for part in parts if not fits(part)]
            make: Any = torch.cuda.Event
            self._events = make(enable_timing=True), make(enable_timing=True)

    def run(self) -> torch.Tensor:
        """(num_outputs,) int64 on the device: every sum, modulo 2^64. Nothing waits for the device."""
        self._began = time.perf_counter()
        device = self._digester.device
        sums = torch.zeros(self._num_outputs, dtype=torch.int64, device=device)
        if self._events is not None:
            self._events[0].record()
            self._kernel.launch(sums)
            sums *= self._factors
        for part in self._rest:
            sums[part.output] += self._digester.add(
                part.name, part.global_shape, part.box, part.values, self._dtype
            )
        if self._events is not None:
            self._events[1].record()
        self._ended = time.perf_counter()
        return sums

    def warm_up(self) -> None:
        """Compiles the kernel, which takes a part of a second, before the first push needs it."""
        if self._kernel is not None:
            self.run()

    @property
    def last_ms(self) -> float:
        """Milliseconds that the last `run` took, on the device where there is one; it must have ended."""
        if self._events is None:
            return 1e3 * (self._ended - self._began)
        return float(self._events[0].elapsed_time(self._events[1]))
