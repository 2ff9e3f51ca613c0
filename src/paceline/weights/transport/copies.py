"""A round's copies between parameters and staging, prepared when a group forms and done in every push."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Move = tuple[torch.Tensor, torch.Tensor]
"""From where, to where: views of one shape, cast on the way"""


class Moves:
    """Copies the same views again and again: within a GPU by one kernel launch, else one after the other.

    It keeps addresses, so it is only good as long as the views' storage stays where it is.
    """

    def __init__(self, moves: Sequence[Move]) -> None:
        on_device = [all(view.is_cuda for view in move) for move in moves]
        self._rest = [move for move, fast in zip(moves, on_device, strict=True) if not fast]
        self._kernel: Any = None
        if any(on_device):
            from paceline.weights.transport.copies_kernel import MoveKernel

            fast = [move for move, fast in zip(moves, on_device, strict=True) if fast]
            self._kernel = MoveKernel(fast, fast[0][0].device)
            self._rest += self._kernel.rest

    def run(self) -> None:
        """Copies everything; on a GPU it is queued."""
        if self._kernel is not None:
            self._kernel.launch()
        for source, target in self._rest:
            target.copy_(source)

    def warm_up(self) -> None:
        """Compiles the kernel, which takes a part of a second, before the first push needs it."""
        if self._kernel is not None:
            self._kernel.warm_up()
