"""Times the phases of a training step, for `timing_s/*`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Stopwatch:
    """Seconds by phase, under `timing_s/`."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a block; on CUDA until its kernels are done."""
        began = time.monotonic()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[f"timing_s/{name}"] = time.monotonic() - began
