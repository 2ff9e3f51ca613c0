"""The best validation of each set of held-out prompts so far, and how far the newest one lies below it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.config.validation import HeldOutSet
from paceline.core.guard import Reading


@dataclass(frozen=True, kw_only=True, slots=True)
class BestValidation:
    """A validation's step, its mean reward, and the lower end of the mean's interval."""

    step: int
    mean: float
    low: float


class BestValidations:
    """Remembers the best validation of each set; part of the checkpoint."""

    def __init__(self) -> None:
        self._best: dict[str, BestValidation] = {}

    def readings(
        self, step: int, metrics: Mapping[str, float], sets: Sequence[HeldOutSet]
    ) -> Iterator[Reading]:
        """Returns the readings of the validation after a step, and notes the validation if it is the best so
        far.

        Args:
            sets: the run's sets; some may have no part in this validation.
        """
        for held_out in sets:
            mean, low, high = (
                metrics.get(f"{held_out.metrics}reward/{name}", math.nan) for name in ("mean", "low", "high")
            )
            if not math.isfinite(mean):
                continue
            best = self._best.get(held_out.name)
            if best is not None:
                yield Reading(
                    rule="val_fall",
                    network=held_out.name,
                    value=best.low - high,
                    detail=f"mean reward {mean:.4g}, {best.mean:.4g} after step {best.step}",
                )
            if best is None or mean > best.mean:
                self._best[held_out.name] = BestValidation(step=step, mean=mean, low=low)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as plain values."""
        return {name: asdict(best) for name, best in sorted(self._best.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state_dict` returned."""
        self._best = {name: BestValidation(**best) for name, best in state.items()}
