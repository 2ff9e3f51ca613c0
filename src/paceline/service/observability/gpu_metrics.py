"""Measures memory, utilisation and power of the GPUs that this process may use, through NVML.

NVML numbers all GPUs of the machine; CUDA_VISIBLE_DEVICES selects some. Without the package nvidia-ml-py, a
driver or a GPU there are no such metrics; values that a device does not support are omitted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.service.observability import metrics
from paceline.service.observability.metrics import Metric, Observation, Observe, Observer

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gpu:
    handle: Any
    labels: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class VisibleGpu:
    """A GPU's name, as its driver reports it, and its memory in bytes."""

    name: str
    num_bytes: int


def visible_gpus() -> dict[int, VisibleGpu]:
    """Returns the GPUs that this process may use, by index; {} if NVML finds none."""
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
        return {
            int(pynvml.nvmlDeviceGetIndex(handle)): VisibleGpu(
                name=str(pynvml.nvmlDeviceGetName(handle)),
                num_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            )
            for handle in _visible(pynvml)
        }
    except pynvml.NVMLError as error:
        log.debug("no GPU memory: %s", error)
        return {}


def observe_gpus(observe: Observe) -> None:
    """Offers the metrics of the visible GPUs, if NVML finds any."""
    try:
        import pynvml
    except ImportError:
        return
    try:
        pynvml.nvmlInit()
        gpus = [_describe(pynvml, handle) for handle in _visible(pynvml)]
    except pynvml.NVMLError as error:
        log.debug("no GPU metrics: %s", error)
        return
    if not gpus:
        return
    readings: dict[Metric, Callable[[Any], float]] = {
        metrics.GPU_MEMORY_USED: lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle).used,
        metrics.GPU_MEMORY_TOTAL: lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle).total,
        metrics.GPU_UTILISATION: lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        metrics.GPU_POWER: lambda handle: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
    }
    for metric, read in readings.items():
        observe(metric, _observer(gpus, read, pynvml.NVMLError))


def _observer(gpus: list[_Gpu], read: Callable[[Any], float], failure: type[Exception]) -> Observer:
    def observations() -> Iterator[Observation]:
        for gpu in gpus:
            try:
                value = read(gpu.handle)
            except failure as error:  # not supported, or the device has fallen off the bus
                log.debug("GPU %s: %s", gpu.labels["gpu"], error)
                continue
            yield value, gpu.labels

    return observations


def _visible(nvml: Any) -> list[Any]:
    """Returns handles of the GPUs that CUDA shows to this process."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    handles = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name.isdecimal():
            handles.append(nvml.nvmlDeviceGetHandleByIndex(int(name)))
        elif name.startswith(("GPU-", "MIG-")):
            handles.append(nvml.nvmlDeviceGetHandleByUUID(name))
        else:
            break  # CUDA ignores this name and all that follow
    return handles


def _describe(nvml: Any, handle: Any) -> _Gpu:
    labels = {"gpu": str(nvml.nvmlDeviceGetIndex(handle)), "uuid": str(nvml.nvmlDeviceGetUUID(handle))}
    return _Gpu(handle=handle, labels=labels)
