"""Tensors in host memory that are sharded as others on GPUs are."""

from __future__ import annotations

import logging
import mmap
import weakref

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from paceline.learner.distributed.ranks import Ranks

log = logging.getLogger(__name__)


def host_mesh(ranks: Ranks) -> DeviceMesh:
    """Tensors on the CPU cannot be sharded over a mesh of GPUs; this one is the same ranks' CPUs."""
    return ranks.fsdp if ranks.device.type == "cpu" else cpu_mesh_like(ranks.fsdp)


def cpu_mesh_like(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of CPUs in the shape of another, with its groups; for where parts lie, not to send."""
    return DeviceMesh.from_group(
        mesh.get_all_groups(), "cpu", mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names
    )


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, local: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
    """The tensor whose part on this rank is `local`, sharded by rows as another is.

    Args:
        tensor: the other, with as many rows.
        local: this rank's rows; their shape may be another.
        mesh: over which it is sharded; None: the other's.
    """
    if not isinstance(tensor, DTensor):
        return local
    shape = torch.Size((tensor.shape[0], *local.shape[1:])) if tensor.ndim else tensor.shape
    return DTensor.from_local(
        local,
        mesh or tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def pinned_memory(num_bytes: int) -> Tensor:
    """Host memory, zeros, that is pinned as long as a tensor uses it; torch's own would be a power of two.

    CUDA refuses to copy to and from memory that comes to lie where a buffer was that is still registered.
    """
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    # The storage that all views share keeps the mapping. A tensor would not do: its views outlive it.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer = torch.frombuffer(memory, dtype=torch.uint8).zero_()  # by all threads; CUDA would take one
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(buffer.data_ptr(), num_bytes, 0))
    if code == 0:
        weakref.finalize(memory, runtime.cudaHostUnregister, buffer.data_ptr())
    else:
        log.warning(
            "%d MiB of host memory cannot be pinned (CUDA error %d); copies are slower",
            num_bytes >> 20,
            code,
        )
    return buffer
