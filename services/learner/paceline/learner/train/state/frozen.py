"""Holds networks that score samples and are never updated: the reference model and others of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage, nn

from paceline.learner.distributed.host_memory import host_memory, local_part
from paceline.learner.model.lora import base_alone
from paceline.learner.model.networks import PolicyNetwork


class FrozenNetwork:
    """A network that scores samples and is never updated; it can compute within `present`.

    Args:
        network: a sharded, loaded network; the policy's if the reference is the policy without adapters.
        digest: digest of its weights; "" for the policy's own network.
        in_host_memory: whether this rank's shards are in host memory outside `present`.
    """

    def __init__(self, network: PolicyNetwork, *, digest: str = "", in_host_memory: bool = False) -> None:
        self.network, self.digest = network, digest
        self._host = HostShards(network) if in_host_memory else None

    @contextmanager
    def present(self) -> Iterator[None]:
        """Makes the network ready within the block; disables adapters in the policy's own network."""
        with base_alone(self.network):
            if self._host is None:
                yield
            else:
                with self._host.present():
                    yield


class HostShards:
    """Keeps this rank's shards of a network in host memory, and on its device within `present`.

    Storages on the device are emptied and refilled. The tensors stay, and so does FSDP's state.
    """

    def __init__(self, network: nn.Module) -> None:
        storages = [local_part(parameter).untyped_storage() for parameter in network.parameters()]
        self._storages = [storage for storage in storages if storage.nbytes()]
        sizes = [storage.nbytes() for storage in self._storages]
        self._on_gpu = any(storage.device.type == "cuda" for storage in self._storages)
        self._hosts = torch.split(host_memory(sum(sizes), pinned=self._on_gpu), sizes)
        for storage, host in zip(self._storages, self._hosts, strict=True):
            host.copy_(_bytes_of(storage))
        self._empty()

    @contextmanager
    def present(self) -> Iterator[None]:
        """Makes the network ready to compute within the block."""
        try:
            for storage, host in zip(self._storages, self._hosts, strict=True):
                storage.resize_(host.nbytes)
                _bytes_of(storage).copy_(host, non_blocking=True)
            yield
        finally:
            if self._on_gpu:
                torch.cuda.synchronize(self._storages[0].device)  # another stream may still gather the shards
            self._empty()

    def _empty(self) -> None:
        for storage in self._storages:
            storage.resize_(0)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
