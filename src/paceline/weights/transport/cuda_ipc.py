"""Shares device memory between two processes on one GPU, through CUDA's driver.

torch's own sharing keeps memory until the process that opened it releases it, so memory opened by a killed
server would never be freed. Here the allocating process frees it.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, Final

import torch

HANDLE_BYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1
_LIBRARY: Final = "libcuda.so.1"


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class CudaIpcError(RuntimeError):
    """Says which call of the driver failed, and why."""


def allocate(num_bytes: int, device: torch.device) -> int:
    """Allocates memory on `device`; returns its address."""
    address = ctypes.c_uint64()
    _call(device, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
    return address.value


def free(address: int, device: torch.device) -> None:
    """Frees memory that `allocate` returned; waits for the device."""
    _call(device, "cuMemFree_v2", ctypes.c_uint64(address))


def export(address: int, device: torch.device) -> bytes:
    """Returns a handle with which another process on this GPU opens the memory."""
    handle = _Handle()
    _call(device, "cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle)


def open_handle(handle: bytes, device: torch.device) -> int:
    """Maps another process's memory into this process; returns its address here."""
    address = ctypes.c_uint64()
    structure = _Handle.from_buffer_copy(handle)
    _call(
        device,
        "cuIpcOpenMemHandle_v2",
        ctypes.byref(address),
        structure,
        ctypes.c_uint(_LAZY_PEER_ACCESS),
    )
    return address.value


def close_handle(address: int, device: torch.device) -> None:
    """Unmaps memory that `open_handle` mapped; the process that allocated it keeps it."""
    _call(device, "cuIpcCloseMemHandle", ctypes.c_uint64(address))


def as_bytes(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Returns the memory as a uint8 tensor (num_bytes,); it must not outlive the memory."""
    interface = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}
    pointer = SimpleNamespace(__cuda_array_interface__={**interface, "strides": None})
    tensor: torch.Tensor = torch.as_tensor(pointer, device=device)
    return tensor


def _call(device: torch.device, name: str, *arguments: Any) -> None:
    # The driver works in the thread's current context, which is torch's after a call of torch.
    with torch.cuda.device(device):
        torch.cuda.current_stream(device)
        driver = ctypes.CDLL(_LIBRARY)
        code = getattr(driver, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            driver.cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise CudaIpcError(f"{name} failed on {device}: {reason} ({code})")
