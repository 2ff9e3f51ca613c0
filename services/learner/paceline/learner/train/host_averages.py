"""AdamW's averages in host memory (`actor.memory.offload`): parts of them visit the GPU in each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.adamw import adamw

from paceline.learner.distributed.host_memory import local_part, pinned_memory, sharded_like

PART_BYTES: Final = 512 << 20
"""Of parameters, whose averages are on the GPU at a time"""

_AVERAGES: Final = ("exp_avg", "exp_avg_sq")


def host_averages(parameters: Sequence[Tensor], mesh: DeviceMesh) -> list[dict[str, Tensor]]:
    """Averages of zeros in pinned memory, one dict per parameter, sharded as they are.

    Args:
        parameters: sharded.
        mesh: of CPUs, in the shape of theirs.
    """
    locals_ = [local_part(parameter) for parameter in parameters]
    total = sum(len(_AVERAGES) * local.numel() for local in locals_)
    pinned = any(local.is_cuda for local in locals_)
    buffer = pinned_memory(4 * total) if pinned else torch.empty(4 * total, dtype=torch.uint8)
    numbers = buffer.view(torch.float32).zero_()
    averages: list[dict[str, Tensor]] = []
    begin = 0
    for parameter, local in zip(parameters, locals_, strict=True):
        averages.append({})
        for name in _AVERAGES:
            place = numbers[begin : begin + local.numel()].view(local.shape)
            begin += local.numel()
            averages[-1][name] = sharded_like(parameter, place, mesh)
    return averages


@torch.no_grad()
def step_from_host(optimizer: torch.optim.AdamW) -> None:
    """A step with averages in host memory: the same numbers as `optimizer.step()`."""
    for group in optimizer.param_groups:
        beta1, beta2 = group["betas"]
        for part in _parts([parameter for parameter in group["params"] if parameter.grad is not None]):
            states = [optimizer.state[parameter] for parameter in part]
            hosts = [[local_part(state[name]) for state in states] for name in _AVERAGES]
            device = local_part(part[0]).device
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
            for kind, moved in zip(hosts, (averages, squares), strict=True):
                for host, visitor in zip(kind, moved, strict=True):
                    if host is not visitor:  # on a CPU they are the same
                        host.copy_(visitor, non_blocking=True)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a checkpoint may read them next


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
