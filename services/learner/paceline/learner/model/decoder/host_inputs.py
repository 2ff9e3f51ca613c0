"""Keeps inputs of recomputed layers in pinned host memory between forward and backward pass.

forward:   layer i computes, while its input is copied to the host; that of layer i - 2 leaves the GPU
backward:  layer i is recomputed, while the input of layer i - 1 comes back to the GPU

So two inputs are on the GPU at a time. Copies have a stream of their own, in order, and only bytes move. On a
CPU the same code copies within host memory.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, get_device_module, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from paceline.config.training.memory import MemoryConfig
from paceline.core.errors import EnvironmentLackError
from paceline.learner.distributed.host_memory import host_memory
from paceline.learner.distributed.ranks import Ranks
from paceline.service.host_memory import free_host_bytes

log = logging.getLogger(__name__)

_GIB = 1 << 30


class HostInputs:
    """Keeps the inputs of a rank's layers; its networks share the host memory, which is pinned once.

    Args:
        num_tokens: tokens of a usual micro-batch; larger ones replace buffers by larger ones.
        limit: most bytes of host memory. Inputs for which none is left stay on the device.
    """

    def __init__(self, *, num_tokens: int, limit: int) -> None:
        self._num_tokens, self._limit = num_tokens, limit
        self._free: list[Tensor] = []
        self._latest: weakref.ref[_Input] | None = None
        self._stream: Any = None
        self._is_full = False
        self.num_bytes = 0

    @classmethod
    def of(cls, memory: MemoryConfig, *, num_tokens: int, ranks: Ranks) -> HostInputs | None:
        """Returns what a memory configuration asks for, on one of this host's ranks; None for nothing.

        Raises:
            EnvironmentLackError: the host has less free memory than its ranks may pin.
        """
        if not memory.inputs_on_host:
            return None
        free = free_host_bytes()
        most, given = int(memory.host_share * free) // ranks.num_local, memory.host_limit
        if given is not None and given > most:
            raise EnvironmentLackError(
                f"memory.host_gib={memory.host_gib:g} on each of {ranks.num_local} ranks of this host is "
                f"more than its free memory, {free / _GIB:.1f} GiB; set it to at most {most // _GIB}, or "
                "recompute: full, which keeps inputs of layers on the GPU"
            )
        return cls(num_tokens=num_tokens, limit=most if given is None else given)

    def keep_for(self, layers: Iterable[nn.Module]) -> None:
        """Makes recomputed layers keep their inputs here; call it after enabling their recomputation."""
        for layer in layers:
            layer._gradient_checkpointing_func = self._checkpoint  # type: ignore[assignment]

    def _checkpoint(self, function: Callable[..., Any], hidden: Tensor, *others: Any, **options: Any) -> Any:
        """Calls a layer whose backward pass computes it again; stands in for torch's `checkpoint`."""
        with saved_tensors_hooks(partial(self._pack, hidden.data_ptr()), _unpack):
            return checkpoint(function, hidden, *others, use_reentrant=False, **options)

    @torch.no_grad()
    def _pack(self, address: int, tensor: Tensor) -> _Input | Tensor:
        """Begins to copy a tensor to the host if it is the layer's input; others stay as they are."""
        if tensor.data_ptr() != address or not tensor.is_contiguous():
            return tensor
        latest = None if self._latest is None else self._latest()
        if latest is not None and (older := latest.previous()) is not None:
            older.leave_device()
        if self._stream is None:
            self._stream = get_device_module(tensor.device).Stream(tensor.device)
        kept = _Input(self, tensor, self._take(tensor), self._stream, latest)
        self._latest = weakref.ref(kept)
        return kept

    def _take(self, tensor: Tensor) -> Tensor | None:
        """Returns a buffer of at least a tensor's bytes; None if the limit leaves none."""
        for number, buffer in enumerate(self._free):
            if buffer.nbytes >= tensor.nbytes:
                return self._free.pop(number)
        usual = self._num_tokens * tensor.shape[-1] * tensor.itemsize
        size = max(tensor.nbytes, usual)
        if self._free:  # all are too small, so a larger one replaces one of them
            self.num_bytes -= self._free.pop().nbytes
        while self._free and self.num_bytes + size > self._limit:
            self.num_bytes -= self._free.pop().nbytes
        if self.num_bytes + size > self._limit:
            if not self._is_full:
                log.warning(
                    "%.1f GiB of host memory are used up, so inputs of further layers stay on the GPU; raise "
                    "memory.host_gib if the host has more",
                    self._limit / _GIB,
                )
            self._is_full = True
            return None
        self.num_bytes += size
        return host_memory(size, pinned=tensor.is_cuda)

    def give_back(self, buffer: Tensor) -> None:
        """Takes a buffer back; copies from and to it may still be under way on the stream."""
        self._free.append(buffer)


class _Input:
    """A layer's input: on the device, in host memory, or on one of the ways.

    It lives as long as the layer's part of the graph, so a pass that fails gives its buffers back, too.

    Args:
        inputs: whose buffer this is.
        tensor: the input, which the current stream computes.
        buffer: host memory; None: the input stays on the device.
        stream: for the copies.
        previous: the input that was kept before this one, which the backward pass needs after it.
    """

    def __init__(
        self,
        inputs: HostInputs,
        tensor: Tensor,
        buffer: Tensor | None,
        stream: Any,
        previous: _Input | None,
    ) -> None:
        self._inputs, self._buffer, self._stream = inputs, buffer, stream
        self._previous = None if previous is None else weakref.ref(previous)
        self._tensor: Tensor | None = tensor
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self._compute: Any = None
        self._event: Any = None
        self._is_back = False
        if buffer is not None:
            self._copy(self._place(buffer), tensor)

    def previous(self) -> _Input | None:
        """Returns the input that was kept before this one, if it is still kept."""
        return None if self._previous is None else self._previous()

    def leave_device(self) -> None:
        """Frees the device's memory; the device waits until the copy to the host is done."""
        if self._buffer is not None and self._tensor is not None and not self._is_back:
            self._wait()
            self._tensor = None

    def come_back(self) -> None:
        """Begins to copy the input back to the device, unless it is there."""
        if self._tensor is None and self._buffer is not None:
            # The copy waits for the kernels before it, which may use the memory that this tensor gets.
            self._tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._is_back = True
            self._copy(self._tensor, self._place(self._buffer))

    def take(self) -> Tensor:
        """Returns the input on the device, and begins to bring the previous one back."""
        self.come_back()
        if (previous := self.previous()) is not None:
            previous.come_back()
        assert self._tensor is not None
        tensor = self._tensor
        if self._is_back:
            self._wait()
            self._tensor, self._is_back = None, False
        return tensor

    def _place(self, buffer: Tensor) -> Tensor:
        return buffer[: self._shape.numel() * self._dtype.itemsize].view(self._dtype).view(self._shape)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        """Copies on the stream, after what the current stream has begun."""
        module: Any = get_device_module(self._device)
        self._compute = module.current_stream(self._device)
        self._stream.wait_stream(self._compute)
        with module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._event = module.Event()
            self._event.record(self._stream)

    def _wait(self) -> None:
        """Lets the stream that began the last copy wait for it."""
        self._compute.wait_event(self._event)

    def __del__(self) -> None:
        if self._is_back:  # its memory must not be used anew while the copy still writes to it
            self._wait()
        if self._buffer is not None:
            self._inputs.give_back(self._buffer)


@torch.no_grad()
def _unpack(kept: _Input | Tensor) -> Tensor:
    return kept.take() if isinstance(kept, _Input) else kept
