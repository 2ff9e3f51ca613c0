"""Copies a round between parameters and staging; prepared when a group forms and run in every push."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Copy = tuple[torch.Tensor, torch.Tensor]
"""Source and target: views of one shape; the copy casts to the target's type"""


class CopyJob:
    """Copies the same views repeatedly: within a GPU in one kernel launch, otherwise one by one.

    A job keeps addresses, so it is valid only as long as the views' storage stays where it is.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._kernel: Any = None
        self._rest = list(copies)
        on_device = [copy for copy in copies if all(view.is_cuda for view in copy)]
        if on_device:
            # Triton exists only where CUDA does.
            from paceline.weights.kernels import CopyKernel

            self._kernel = CopyKernel(on_device, on_device[0][0].device)
            self._rest = [copy for copy in copies if not all(view.is_cuda for view in copy)]
            self._rest += [on_device[index] for index in self._kernel.skipped]

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
