"""Compiles decoder layers, and counts the time that this takes."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from paceline.learner.model import attention

BACKEND: Any = "inductor"
"""What torch.compile makes kernels with."""
MAX_VARIANTS = 32
"""Compilations of one piece of a layer: with and without gradients, by kind of layer, by network."""


def compile_layers(layers: nn.ModuleList, kept_share: float) -> None:
    """Compiles every layer's forward pass; layers of one kind share their code, whatever the token count.

    Attention is left as it is: it has kernels of its own, and it reads where sequences begin, which would
    compile anew for every micro-batch.

    Args:
        layers: not sharded yet.
        kept_share: share of the activations that the compiler keeps, from what costs most to compute again.
            At 0 whole layers are recomputed instead, by whoever calls them.
    """
    import torch._functorch.config as partitioner
    from torch import _dynamo

    attention.keep_out_of_graphs()
    partitioner.activation_memory_budget = kept_share or 1.0
    _dynamo.config.recompile_limit = max(_dynamo.config.recompile_limit, MAX_VARIANTS)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=BACKEND, dynamic=True)


class CompileClock:
    """Counts compilations in this process from now on, those of backward passes included."""

    def __init__(self) -> None:
        from torch._dynamo.callback import callback_handler

        self._count, self._seconds, self._began = 0, 0.0, 0.0
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)

    def take(self) -> tuple[int, float]:
        """How many there were since the last call, and the seconds that they took."""
        taken = self._count, self._seconds
        self._count, self._seconds = 0, 0.0
        return taken

    def _begin(self, *_: Any) -> None:
        self._began = time.monotonic()

    def _end(self, *_: Any) -> None:
        self._count += 1
        self._seconds += time.monotonic() - self._began
