"""Takes steps with AdamW's averages in host memory (`actor.memory.offload`) or in 8 bits, in parts.

host -- one part --> GPU, AdamW -- the previous part --> host, both directions at once
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from paceline.learner.distributed.host_memory import host_memory, local_part, sharded_like
from paceline.learner.train.state.compact_averages import float32_step, is_compact, step_compact

PART_BYTES: Final = 256 << 20
"""Bytes of parameters per part; the averages of two parts are on the GPU at a time."""

AVERAGES: Final = ("exp_avg", "exp_avg_sq")

Form = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of this rank's part of an average."""

_ALIGNMENT: Final = 16


def zero_averages(
    forms: Mapping[nn.Parameter, Mapping[str, Form]], *, on_host: bool
) -> dict[Tensor, dict[str, Tensor]]:
    """Returns averages of zeros, by parameter and name, sharded like the parameters.

    Args:
        forms: type and shape of each parameter's averages, by name.
        on_host: whether they are in host memory, pinned for parameters on a GPU.
    """
    sizes = [_num_bytes(form) for own in forms.values() for form in own.values()]
    pinned = any(local_part(parameter).is_cuda for parameter in forms)
    buffer = host_memory(sum(sizes) if on_host else 0, pinned=pinned)
    averages: dict[Tensor, dict[str, Tensor]] = {}
    begin = 0
    for parameter, own in forms.items():
        averages[parameter] = {}
        for name, (dtype, shape) in own.items():
            if not on_host:
                place = torch.zeros(shape, dtype=dtype, device=local_part(parameter).device)
            else:
                place = buffer[begin : begin + dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
                begin += _num_bytes((dtype, shape))
            averages[parameter][name] = sharded_like(parameter, place)
    return averages


def _num_bytes(form: Form) -> int:
    """Returns the bytes of a buffer that an average takes, with padding."""
    dtype, shape = form
    return -(-dtype.itemsize * math.prod(shape) // _ALIGNMENT) * _ALIGNMENT


@torch.no_grad()
def step_in_parts(optimizer: torch.optim.AdamW) -> None:
    """Takes `optimizer.step()` with averages in host memory or in 8 bits, part by part."""
    way_back = _WayBack()
    for group in optimizer.param_groups:
        for part in _parts([parameter for parameter in group["params"] if parameter.grad is not None]):
            device = local_part(part[0]).device
            steps = [optimizer.state[parameter]["step"] for parameter in part]
            states = [optimizer.state[parameter].items() for parameter in part]
            kept = [{name: local_part(tensor) for name, tensor in own if name != "step"} for own in states]
            way_back.drain(most=1)
            visiting = [
                {name: tensor.to(device, non_blocking=True) for name, tensor in own.items()} for own in kept
            ]
            _step(part, visiting, steps, group)
            # On a CPU, or without host averages, these are the stored averages themselves.
            moved = [
                (visitor, own[name])
                for visitors, own in zip(visiting, kept, strict=True)
                for name, visitor in visitors.items()
                if visitor is not own[name]
            ]
            if moved:
                way_back.send(moved, device)
    way_back.drain(most=0)  # a checkpoint may read the averages next


def _step(
    part: Sequence[Tensor],
    averages: Sequence[Mapping[str, Tensor]],
    steps: Sequence[Tensor],
    group: Mapping[str, Any],
) -> None:
    """Takes AdamW's step on parameters with averages on the same device."""
    in_float32 = []
    for parameter, own, step in zip(part, averages, steps, strict=True):
        assert parameter.grad is not None
        local, gradient = local_part(parameter), local_part(parameter.grad)
        if is_compact(own):
            step_compact(local, gradient, own, step, group)
        else:
            in_float32.append((local, gradient, own, step))
    float32_step(
        [local for local, _, _, _ in in_float32],
        [gradient for _, gradient, _, _ in in_float32],
        [own[AVERAGES[0]] for _, _, own, _ in in_float32],
        [own[AVERAGES[1]] for _, _, own, _ in in_float32],
        [step for _, _, _, step in in_float32],
        group,
    )


class _WayBack:
    """Copies parts back to the host on a separate stream, while the next part comes to the GPU."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._parts: deque[torch.cuda.Event] = deque()

    def drain(self, *, most: int) -> None:
        """Waits until at most this many parts are being copied."""
        while len(self._parts) > most:
            self._parts.popleft().synchronize()

    def send(self, moved: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
        """Begins to copy averages, which the current stream computes, back to host memory."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for visitor, host in moved:
                host.copy_(visitor, non_blocking=True)
                visitor.record_stream(self._stream)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._parts.append(event)


def _parts(parameters: Sequence[Any]) -> Iterator[list[Any]]:
    """Yields parts of the parameters, of about `PART_BYTES` and at least one parameter each."""
    part: list[Any] = []
    size = 0
    for parameter in parameters:
        num_bytes = local_part(parameter).nbytes
        if part and size + num_bytes > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(parameter)
        size += num_bytes
    if part:
        yield part
