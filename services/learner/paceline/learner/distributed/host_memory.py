"""Tensors in host memory that are sharded as others on GPUs are."""

from __future__ import annotations

import logging
import weakref

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from paceline.learner.distributed.ranks import Ranks

log = logging.getLogger(__name__)


def host_mesh(ranks: Ranks) -> DeviceMesh:
    """Tensors on the CPU cannot be sharded over a mesh of GPUs; this one has the same shape."""
    return ranks.mesh if ranks.device.type == "cpu" else DeviceMesh.from_group(ranks.storage, "cpu")


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, local: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor whose part on this rank is `local`, sharded over `mesh` as another is."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def pinned_memory(num_bytes: int) -> Tensor:
    """Host memory that is pinned until the tensor is dropped; torch's own would be a power of two of bytes.

    CUDA refuses to copy to and from memory that comes to lie where a buffer was that is still registered.
    """
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(buffer.data_ptr(), num_bytes, 0))
    if code == 0:
        weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr())
    else:
        log.warning(
            "%d MiB of host memory cannot be pinned (CUDA error %d); copies are slower",
            num_bytes >> 20,
            code,
        )
    return buffer
