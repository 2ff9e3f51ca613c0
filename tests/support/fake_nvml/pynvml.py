"""NVML of a machine with one GPU that draws 300 W: put this folder first on a process's PYTHONPATH."""

from __future__ import annotations

from types import SimpleNamespace


class NVMLError(Exception):
    pass


def nvmlInit() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return 1


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetIndex(handle: int) -> int:
    return handle


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-{handle}"


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(used=7 * 2**30, total=80 * 2**30)


def nvmlDeviceGetUtilizationRates(handle: int) -> SimpleNamespace:
    return SimpleNamespace(gpu=50)


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    return 300_000
