"""The tensors that a checkpoint holds, and their copy in host memory while they are written."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.loading import hugging_face_names
from paceline.learner.train.learner import Learner
from paceline.learner.train.optimizer import Trainable

log = logging.getLogger(__name__)

POLICY = "actor"
"""Name of the policy's tensors."""

State = dict[str, dict[str, Tensor]]

_ALIGNMENT = 64


def state_of(learner: Learner) -> State:
    """Everything that is saved; loading writes into these tensors."""
    trainables: dict[str, Trainable[Any]] = {POLICY: learner.actor}
    if learner.critic is not None:
        trainables["critic"] = learner.critic
    state: State = {"rng": {"cpu": torch.get_rng_state()}}
    for name, trainable in trainables.items():
        parameters = hugging_face_names(trainable.network)
        # What is frozen comes from the model's folder.
        state[name] = {key: parameter for key, parameter in parameters if parameter.requires_grad}
        state[f"{name}_optimizer"] = trainable.optimizer.state()
    return state


class HostCopy:
    """Copies a state into host memory that is allocated once, and pinned if the state is on a GPU."""

    def __init__(self, ranks: Ranks) -> None:
        self._device = ranks.device
        # Tensors on the CPU cannot be sharded over a mesh of GPUs; this one has the same shape.
        self._mesh = ranks.mesh if ranks.device.type == "cpu" else DeviceMesh.from_group(ranks.storage, "cpu")
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def take(self, state: Mapping[str, Mapping[str, Tensor]]) -> State:
        """The state in host memory; it overwrites the copy that was taken before."""
        num_bytes = sum(_padded(_local(tensor)) for tensors in state.values() for tensor in tensors.values())
        if num_bytes != self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)  # before there is a second one
            is_cuda = self._device.type == "cuda"
            self._buffer = pinned_memory(num_bytes) if is_cuda else torch.empty(num_bytes, dtype=torch.uint8)
        copied: State = {}
        offset = 0
        for part, tensors in state.items():
            copied[part] = {}
            for name, tensor in tensors.items():
                local = _local(tensor)
                place = self._buffer[offset : offset + local.nbytes].view(local.dtype).view(local.shape)
                place.copy_(local, non_blocking=True)
                copied[part][name] = self._like(tensor, place)
                offset += _padded(local)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return copied

    def _like(self, tensor: Tensor, local: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return local
        return DTensor.from_local(
            local,
            self._mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _padded(tensor: Tensor) -> int:
    return math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT


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
            "%d MiB of host memory for checkpoints cannot be pinned (CUDA error %d); copies are slower",
            num_bytes >> 20,
            code,
        )
    return buffer
