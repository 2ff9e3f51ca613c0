"""AdamW's averages in host memory (`actor.memory.offload`): parts of them visit the GPU in each step.

host -- one part --> GPU, AdamW -- the part before --> host, both ways at once
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.adamw import adamw

from paceline.learner.distributed.host_memory import local_part, pinned_memory, sharded_like

PART_BYTES: Final = 256 << 20
"""Of parameters whose averages are a part; the averages of two parts are on the GPU at a time."""

AVERAGES: Final = ("exp_avg", "exp_avg_sq")


def host_averages(names: Mapping[Tensor, Sequence[str]], mesh: DeviceMesh) -> dict[Tensor, dict[str, Tensor]]:
    """Averages of zeros in pinned memory, by parameter and name, sharded as the parameters are.

    Args:
        names: of each parameter's averages; the parameters are sharded.
        mesh: of CPUs, in the shape of theirs.
    """
    locals_ = {parameter: local_part(parameter) for parameter in names}
    total = sum(len(own) * locals_[parameter].numel() for parameter, own in names.items())
    pinned = any(local.is_cuda for local in locals_.values())
    buffer = pinned_memory(4 * total) if pinned else torch.zeros(4 * total, dtype=torch.uint8)
    numbers = buffer.view(torch.float32)
    averages: dict[Tensor, dict[str, Tensor]] = {}
    begin = 0
    for parameter, local in locals_.items():
        averages[parameter] = {}
        for name in names[parameter]:
            place = numbers[begin : begin + local.numel()].view(local.shape)
            begin += local.numel()
            averages[parameter][name] = sharded_like(parameter, place, mesh)
    return averages


@torch.no_grad()
def step_from_host(optimizer: torch.optim.AdamW) -> None:
    """A step with averages in host memory: the same numbers as `optimizer.step()`."""
    way_back = _WayBack()
    for group in optimizer.param_groups:
        beta1, beta2 = group["betas"]
        for part in _parts([parameter for parameter in group["params"] if parameter.grad is not None]):
            states = [optimizer.state[parameter] for parameter in part]
            hosts = [[local_part(state[name]) for state in states] for name in AVERAGES]
            device = local_part(part[0]).device
            way_back.make_room()
            averages, squares = ([host.to(device, non_blocking=True) for host in kind] for kind in hosts)
            adamw(
                [local_part(parameter) for parameter in part],
                [local_part(parameter.grad) for parameter in part],
                averages,
                squares,
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            if device.type == "cuda":  # on a CPU the averages are the hosts' own
                way_back.send([*averages, *squares], [*hosts[0], *hosts[1]], device)
    way_back.close()  # a checkpoint may read them next


class _WayBack:
    """Copies parts back to the host on a stream of its own, beside the next part's way to the GPU."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._parts: deque[torch.cuda.Event] = deque()

    def make_room(self) -> None:
        """Waits until at most one part is on its way."""
        while len(self._parts) > 1:
            self._parts.popleft().synchronize()

    def send(self, visitors: Sequence[Tensor], hosts: Sequence[Tensor], device: torch.device) -> None:
        """Begins to copy what the current stream computes."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for visitor, host in zip(visitors, hosts, strict=True):
                host.copy_(visitor, non_blocking=True)
                visitor.record_stream(self._stream)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._parts.append(event)

    def close(self) -> None:
        """Waits for all parts on their way."""
        while self._parts:
            self._parts.popleft().synchronize()


def _parts(parameters: Sequence[Any]) -> Iterator[list[Any]]:
    """The parameters, as many at a time as are `PART_BYTES`, and at least one."""
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
