"""Shares staging memory that a learner rank allocates and a rollout rank on the same GPU or host opens."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Final, Self

import msgpack
import torch

from paceline.core.errors import InvalidMessageError, WeightSyncError
from paceline.weights.transport import cuda_ipc

_ALIGNMENT: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The data with which a process opens another process's staging memory.

    Attributes:
        pid, descriptor: the process that has the memory file open, and its descriptor; 0 for GPU memory.
        handle: CUDA's handle, for GPU memory.
    """

    num_bytes: int
    pid: int = 0
    descriptor: int = 0
    handle: bytes = b""

    def to_bytes(self) -> bytes:
        """Encodes the ticket for the rendezvous store."""
        data: bytes = msgpack.packb([self.num_bytes, self.pid, self.descriptor, self.handle])
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Reads what `to_bytes` wrote; raises InvalidMessageError if anything is malformed."""
        try:
            num_bytes, pid, descriptor, handle = msgpack.unpackb(data)
            if (type(num_bytes), type(pid), type(descriptor), type(handle)) != (int, int, int, bytes):
                raise TypeError("three numbers and bytes are needed")
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise InvalidMessageError(f"staging ticket: {error}", reason="bad_weight_group") from error
        return cls(num_bytes=num_bytes, pid=pid, descriptor=descriptor, handle=handle)


class SharedStaging:
    """Maps the staging of one rollout rank into one of the two processes.

    `close` ends this process's access; the memory is freed when the allocating process closes it or dies.
    """

    def __init__(self, data: torch.Tensor, ticket: Ticket, device: torch.device, *, is_owner: bool) -> None:
        self._data: torch.Tensor | None = data
        self.ticket, self._device, self._is_owner = ticket, device, is_owner

    @classmethod
    def allocate(cls, num_bytes: int, device: torch.device) -> SharedStaging:
        """Allocates new staging memory on `device`.

        Raises:
            RuntimeError, OSError: there is no memory.
        """
        num_bytes = max(num_bytes, _ALIGNMENT)
        if device.type == "cuda":
            address = cuda_ipc.allocate(num_bytes, device)
            ticket = Ticket(num_bytes=num_bytes, handle=cuda_ipc.export(address, device))
            return cls(cuda_ipc.as_bytes(address, num_bytes, device), ticket, device, is_owner=True)
        descriptor = os.memfd_create("paceline-staging")
        os.ftruncate(descriptor, num_bytes)
        ticket = Ticket(num_bytes=num_bytes, pid=os.getpid(), descriptor=descriptor)
        return cls(_mapped(ticket), ticket, device, is_owner=True)

    @classmethod
    def open(cls, ticket: Ticket, device: torch.device) -> SharedStaging:
        """Opens the staging memory of another process.

        Raises:
            WeightSyncError: the memory cannot be opened from this process.
        """
        try:
            if device.type == "cuda":
                address = cuda_ipc.open_handle(ticket.handle, device)
                data = cuda_ipc.as_bytes(address, ticket.num_bytes, device)
            else:
                data = _mapped(ticket)
        except RuntimeError as error:
            raise WeightSyncError(
                f"the learner's staging memory cannot be opened from this process: {error}. Learner and "
                "rollout server must run in the same container, or in containers with one PID namespace, as "
                "the same user; otherwise set weights.backend: gloo"
            ) from error
        return cls(data, ticket, device, is_owner=False)

    def slots(self, sizes: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        """Returns slots with these numbers of elements; they must not outlive `close`."""
        assert self._data is not None, "the staging was closed"
        slots, begin = [], 0
        for size in sizes:
            num_bytes = size * dtype.itemsize
            slots.append(self._data[begin : begin + num_bytes].view(dtype))
            begin += aligned(num_bytes)
        return slots

    def close(self) -> None:
        """Ends this process's access; may be repeated."""
        data, self._data = self._data, None
        if data is None:
            return
        if self._device.type == "cuda":
            end = cuda_ipc.free if self._is_owner else cuda_ipc.close_handle
            # A failed device has no memory left to free.
            with contextlib.suppress(cuda_ipc.CudaIpcError, RuntimeError):
                end(data.data_ptr(), self._device)
        elif self._is_owner:
            os.close(self.ticket.descriptor)


def aligned(num_bytes: int) -> int:
    """Rounds a slot's size up so that the next slot is aligned."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _mapped(ticket: Ticket) -> torch.Tensor:
    """Maps a memory file, which has no name, through a process that has it open."""
    path = f"/proc/{ticket.pid}/fd/{ticket.descriptor}"
    return torch.from_file(path, shared=True, size=ticket.num_bytes, dtype=torch.uint8)
