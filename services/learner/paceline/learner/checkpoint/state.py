"""The tensors that a checkpoint holds, and their copy in host memory while they are written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.learner.checkpoint.manifest import Base
from paceline.learner.distributed.host_memory import host_memory, local_part, sharded_like
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.loading import hugging_face_names
from paceline.learner.model.lora import described
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.state.optimizer import Trainable
from paceline.weights import corrections

POLICY = "actor"
"""Name of the policy's tensors."""

State = dict[str, dict[str, Tensor]]

_ALIGNMENT = 64


def state_of(learner: Learner) -> State:
    """Returns everything that is saved; loading writes into these tensors."""
    state: State = {"rng": {"cpu": torch.get_rng_state()}}
    for name, trainable in trainables_of(learner).items():
        state |= state_of_trainable(name, trainable)
    return state


def trainables_of(learner: Learner) -> dict[str, Trainable[Any]]:
    """Returns the networks that train, by name."""
    trainables: dict[str, Trainable[Any]] = {POLICY: learner.actor}
    if learner.critic is not None:
        trainables["critic"] = learner.critic
    return trainables


def base_of(learner: Learner) -> Base:
    """Returns the frozen base that the learner's weights belong to."""
    model = learner.config.model
    return Base(
        adapters=None if model.lora is None else described(learner.actor.network.lm, model.lora),
        digest=learner.base_digest,
        vision=model.vision.train,
    )


def digests_of_frozen(learner: Learner) -> dict[str, str]:
    """Returns the digests of the frozen networks with weights of their own, by name."""
    return {name: network.digest for name, network in learner.frozen.items() if network.digest}


def state_of_trainable(name: str, trainable: Trainable[Any]) -> State:
    """Returns a network's parameters and its optimizer's averages."""
    # Frozen weights come from the model's folder, but corrections are part of an export.
    saved: dict[str, Tensor] = {
        key: parameter
        for key, parameter in hugging_face_names(trainable.network)
        if parameter.requires_grad or key.endswith(corrections.PARTS)
    }
    return {
        name: saved,
        f"{name}_optimizer": trainable.optimizer.state(),
    }


class HostCopy:
    """Copies a state into host memory that is allocated once, and pinned if the state is on a GPU."""

    def __init__(self, ranks: Ranks) -> None:
        self._device = ranks.device
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def take(self, state: Mapping[str, Mapping[str, Tensor]]) -> State:
        """Returns a copy of the state in host memory, which overwrites the one before."""
        num_bytes = sum(
            _padded(local_part(tensor)) for tensors in state.values() for tensor in tensors.values()
        )
        if num_bytes != self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)  # frees the old buffer before the new one exists
            self._buffer = host_memory(num_bytes, pinned=self._device.type == "cuda")
        copied: State = {}
        offset = 0
        for part, tensors in state.items():
            copied[part] = {}
            for name, tensor in tensors.items():
                local = local_part(tensor)
                place = self._buffer[offset : offset + local.nbytes].view(local.dtype).view(local.shape)
                place.copy_(local, non_blocking=True)
                copied[part][name] = sharded_like(tensor, place)
                offset += _padded(local)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return copied


def _padded(tensor: Tensor) -> int:
    return math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT
