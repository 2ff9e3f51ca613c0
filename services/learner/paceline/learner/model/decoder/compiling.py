"""Compiles decoder layers, and measures how long that takes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.learner.model.decoder import attention
from paceline.storage.cache import KERNEL_CACHE

BACKEND: Any = "inductor"
"""The compiler that torch.compile uses to generate kernels."""
MAX_VARIANTS = 32
"""The limit of compilations of a piece of a layer; gradients, kinds of layers and networks each need more."""
TOKEN_MULTIPLE = 64
"""Passes through compiled layers have a multiple of this number of tokens.

The compiler makes kernels for any number of tokens, but asks whether it is a multiple of small powers of two
and of vector widths, and compiles anew when the answer changes.
"""


def compile_layers(layers: nn.ModuleList, kept_share: float, device: torch.device) -> None:
    """Compiles every layer's forward pass; layers of one kind share their code, whatever the token count.

    Attention is not compiled: it has its own kernels, and it reads where sequences begin, which would cause a
    compilation for every micro-batch. Kernels are kept where `storage.cache.keep_kernels` says.

    Args:
        layers: not sharded yet.
        kept_share: share of the activations that the compiler keeps, preferring those that cost most to
            recompute. At 0, the caller recomputes whole layers instead.
        device: device on which they will run.
    """
    import torch._functorch.config as partitioner
    from torch import _dynamo

    attention.keep_out_of_graphs()
    _ignore_sizes()
    if device.type == "cuda":
        _leave_cpu_kernels_plain()
    partitioner.activation_memory_budget = kept_share or 1.0
    _dynamo.config.recompile_limit = max(_dynamo.config.recompile_limit, MAX_VARIANTS)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=BACKEND, dynamic=True)


def take_numbers_as_known(layer: nn.Module) -> None:
    """Makes the compiler treat numbers such as a head's size as constants, in parts without parameters.

    By default it does so only outside of FSDP: the kernel of a rotary embedding that FSDP manages would
    divide by a variable for every element, and take seven times as long.

    Args:
        layer: a sharded layer that has not run yet.
    """
    for part in (part for child in layer.children() for part in child.modules()):
        if not any(True for _ in part.parameters(recurse=False)):
            part._is_fsdp_managed_module = False  # type: ignore[assignment]


def _ignore_sizes() -> None:
    """Makes the compiler fuse a norm's two backward reductions at every size.

    By default it does so only from 4,096 tokens or twice the hidden size on, and compiles again at these
    bounds.
    """
    from torch._inductor import config

    if hasattr(config.triton, "mix_order_reduction_non_strict_mode"):
        config.triton.mix_order_reduction_non_strict_mode = True


def _leave_cpu_kernels_plain() -> None:
    """Makes the compiler generate CPU kernels without vector instructions.

    Graphs for GPUs convert a constant on the CPU. For that one kernel the compiler would build and load a
    library for every instruction set that the CPU might have, each in a process that imports torch. With all
    kernels in the cache, this took 34 of 43 s.
    """
    from torch._inductor import config

    if config.cpp.vec_isa_ok is None:  # unless the user set TORCHINDUCTOR_VEC_ISA_OK
        config.cpp.vec_isa_ok = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilations:
    """Counts this process's compilations since the last call.

    Attributes:
        count: number of graphs, backward ones included.
        seconds: seconds that the compilations took.
        num_cached: graphs whose kernels came from the cache.
        phases: phases that took the most seconds, by torch's names; they are nested.
        reasons: why existing graphs could not be reused, in torch's words.
    """

    count: int
    seconds: float
    num_cached: int
    phases: dict[str, float]
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.phases.items())
        text = f"{self.count} compilations of layers took {self.seconds:.1f} s"
        text += f", {self.num_cached} came from {os.environ.get(KERNEL_CACHE, 'the cache')} ({phases})"
        return "; ".join([text, *self.reasons])


class CompileClock:
    """Counts compilations in this process from now on, those of backward passes included."""

    _NUM_PHASES = 8

    def __init__(self) -> None:
        from torch._dynamo.callback import callback_handler

        self._count, self._seconds, self._began = 0, 0.0, 0.0
        self._num_cached, self._phases, self._num_reasons = 0, dict[str, float](), dict[Any, int]()
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)
        self.take()

    def take(self) -> Compilations:
        """Returns the compilations since the last call."""
        from torch._dynamo import utils

        phases = {name: sum(times) for name, times in utils.compilation_time_metrics.items()}
        spent = {name: seconds - self._phases.get(name, 0.0) for name, seconds in phases.items()}
        longest = sorted(spent, key=lambda name: -spent[name])[: self._NUM_PHASES]
        num_cached = _num_cached()
        taken = Compilations(
            count=self._count,
            seconds=self._seconds,
            num_cached=num_cached - self._num_cached,
            phases={name: spent[name] for name in longest},
            reasons=tuple(self._take_reasons()),
        )
        self._count, self._seconds = 0, 0.0
        self._num_cached, self._phases = num_cached, phases
        return taken

    def _take_reasons(self) -> Iterator[str]:
        from torch._dynamo.utils import guard_failures

        for code, reasons in list(guard_failures.items()):
            known = self._num_reasons.get(code, 0)
            yield from (f"{code.co_qualname}: {reason}" for reason in dict.fromkeys(reasons[known:]))
            self._num_reasons[code] = len(reasons)

    def _begin(self, *_: Any) -> None:
        self._began = time.monotonic()

    def _end(self, *_: Any) -> None:
        self._count += 1
        self._seconds += time.monotonic() - self._began


def _num_cached() -> int:
    from torch._dynamo.utils import counters

    return sum(counters[kind][name] for kind, name in _HITS)


_HITS = (("inductor", "fxgraph_cache_hit"), ("aot_autograd", "autograd_cache_hit"))
