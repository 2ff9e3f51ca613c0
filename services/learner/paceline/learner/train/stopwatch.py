"""Times the phases of a training step, for `timing_s/*`, and measures their memory on a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from paceline.learner.distributed.ranks import Ranks

GIB = 1 << 30


@dataclass(slots=True)
class Stopwatch:
    """Measures seconds by phase, under `timing_s/`; on a GPU also the peak memory of tensors in bytes."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a block, on CUDA until its kernels are done; blocks of the same name add up."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        began = time.monotonic()
        yield
        if on_gpu:
            torch.cuda.synchronize(self.device)
            peak = torch.cuda.max_memory_allocated(self.device)
            self.peaks[name] = max(peak, self.peaks.get(name, 0))
        before = self.seconds.get(f"timing_s/{name}", 0.0)
        self.seconds[f"timing_s/{name}"] = before + time.monotonic() - began

    def memory(self, ranks: Ranks) -> dict[str, float]:
        """Returns `perf/memory_gib/*`, each phase's maximum over ranks; every rank calls it."""
        metrics: dict[str, float] = {}
        if self.peaks:
            numbers = {**self.peaks, "reserved": torch.cuda.memory_reserved(self.device)}
            peaks = torch.tensor([*numbers.values()], dtype=torch.float64, device=self.device)
            for name, peak in zip(numbers, ranks.world.all_max(peaks).tolist(), strict=True):
                metrics[f"perf/memory_gib/{name}"] = peak / GIB
        return metrics
