"""The learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(kw_only=True, slots=True)
class Schedule:
    """Sets the learning rate by step: linear warm-up from 0, then decay by `kind`, down to `min_ratio`.

    Steps count from 1. The last step of the warm-up runs at the peak, and so does every later step of
    `constant`. `cosine_with_restarts` decays `cycles` times and restarts at the peak; only its last step is
    at the end of a decay.

    The length of the warm-up and the progress of the decay are state. If a run continues with another number
    of steps, the rest of the decay is spread over the remaining steps.

    Attributes:
        warmup: steps of the warm-up; None: `warmup_ratio` of `total_steps`.
        origin: the step since which the decay has its present length.
        done: the share of the decay that was done at `origin`.
    """

    peak: float
    kind: str
    total_steps: int
    warmup_ratio: float
    min_ratio: float = 0.0
    cycles: int = 1
    warmup: int | None = None
    origin: int = 0
    done: float = 0.0

    def at(self, step: float) -> float:
        """Returns the rate of a step, counted from 1."""
        warmup = self._warmup
        if step <= warmup:
            return self.peak * step / warmup
        if self.kind == "constant":
            return self.peak
        done = self._done(step)
        if self.kind == "linear":
            share = 1.0 - done
        else:
            cycles = self.cycles if self.kind == "cosine_with_restarts" else 1
            in_cycle = 1.0 if done == 1.0 else (cycles * done) % 1.0
            share = 0.5 * (1.0 + math.cos(math.pi * in_cycle))
        return self.peak * (self.min_ratio + (1.0 - self.min_ratio) * share)

    def state_dict(self) -> dict[str, Any]:
        """Returns all fields, so that a continued run can see what has changed."""
        return asdict(self) | {"warmup": self._warmup}

    def load_state_dict(self, state: Mapping[str, Any], *, step: int) -> None:
        """Continues another schedule's progress after `step`; rates and shape stay this schedule's."""
        before = Schedule(**state)
        self.warmup, self.origin, self.done = before._warmup, before.origin, before.done
        if self.total_steps != before.total_steps and step > self._warmup:
            self.origin, self.done = step, before._done(step)

    @property
    def _warmup(self) -> int:
        return math.ceil(self.warmup_ratio * self.total_steps) if self.warmup is None else self.warmup

    def _done(self, step: float) -> float:
        """Returns the share of the decay that is done after a step."""
        start = max(self._warmup, self.origin)
        share = (step - start) / max(1, self.total_steps - start)
        return min(1.0, self.done + (1.0 - self.done) * share)
