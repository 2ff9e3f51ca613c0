"""Copies a round between parameters and staging; prepared when a group forms and run in every push."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.weights.geometry.views import Views, copy_tables


class CopyJob:
    """Copies the same views repeatedly: within a GPU in one kernel launch, otherwise one by one.

    A copy casts to the target's type. A job keeps addresses, so it is valid only as long as the views'
    storage stays where it is.

    Args:
        source, target: views of equal shapes.
    """

    def __init__(self, source: Views, target: Views) -> None:
        self._kernel: Any = None
        rest = np.arange(len(source.tensor))
        (on_device,) = np.nonzero(source.are_cuda & target.are_cuda)
        if len(on_device):
            # Triton exists only where CUDA does.
            from paceline.weights.kernels import CopyKernel

            tables, fits = copy_tables(source[on_device], target[on_device])
            self._kernel = CopyKernel(tables, source.tensors[source.tensor[on_device[0]]].device)
            rest = np.delete(rest, on_device[fits])
        self._rest = list(zip(source[rest], target[rest], strict=True))

    def run(self) -> None:
        """Copies everything; on a GPU the copies are queued."""
        if self._kernel is not None:
            self._kernel.launch()
        for source, target in self._rest:
            target.copy_(source)

    def warm_up(self) -> None:
        """Compiles the kernel before the first push needs it; that takes a fraction of a second."""
        if self._kernel is not None:
            self._kernel.warm_up()
