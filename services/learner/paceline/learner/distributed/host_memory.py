"""Tensors in host memory that are sharded like tensors on GPUs."""

from __future__ import annotations

import logging
import mmap
import weakref
from functools import cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

log = logging.getLogger(__name__)


@cache
def cpu_mesh_like(mesh: DeviceMesh) -> DeviceMesh:
    """Makes a mesh of CPUs with another mesh's shape and groups; it only describes shards.

    CPU tensors cannot be sharded over a mesh of GPUs.
    """
    return DeviceMesh.from_group(
        mesh.get_all_groups(), "cpu", mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names
    )


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, local: Tensor) -> Tensor:
    """Returns the tensor whose part on this rank is `local`, sharded like another tensor.

    Args:
        tensor: the other tensor; it has as many rows, and further dimensions are sharded evenly.
        local: this rank's part, whose rows may have another shape, and which may be on the CPU.
    """
    if not isinstance(tensor, DTensor):
        return local
    mesh = tensor.device_mesh
    if local.device.type != mesh.device_type:
        mesh = cpu_mesh_like(mesh)
    sizes = [tensor.shape[0], *local.shape[1:]] if tensor.ndim else []
    for number, placement in zip(mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, Shard) and placement.dim:
            sizes[placement.dim] *= number
    shape = torch.Size(sizes)
    return DTensor.from_local(
        local,
        mesh,
        tensor.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def host_memory(num_bytes: int, *, pinned: bool) -> Tensor:
    """Allocates zeroed host memory, (num_bytes,) uint8; with `pinned`, it is pinned while a tensor uses it.

    torch's own pinned allocator rounds sizes up to a power of two. The memory is unregistered when it is
    freed, because CUDA refuses copies to and from a new buffer at an address that is still registered for an
    old one.
    """
    if not pinned or not num_bytes:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    # The storage, which all views share, keeps the mapping alive. A tensor could not, because its views
    # outlive it.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # zero_ touches all pages with several threads; cudaHostRegister would do so with one.
    buffer = torch.frombuffer(memory, dtype=torch.uint8).zero_()
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
