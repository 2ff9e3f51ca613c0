"""Rewards whose components are normalised over a batch. Pure: the controller applies it, `verify` repeats it.

    z = (x - mean) / std        reward = sum - weight * x + weight * z

mean and std (of the population) are taken over the samples to train that have the component, so a reward
depends on neither the order of arrival nor who scored it. If all values are equal up to rounding in float32,
z is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Part = tuple[str, float, float]
"""A component's name, its value before it is weighted, and its weight in the sum."""


_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Scale:
    """Mean and standard deviation of a component, in units of `unit`, so that no square overflows."""

    unit: float
    mean: float
    std: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Scale:
        """Computes the scale of at least one value."""
        unit = max(map(abs, values)) or 1.0
        scaled = [value / unit for value in values]
        mean = math.fsum(scaled) / len(scaled)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in scaled) / len(scaled))
        return cls(unit, mean, std if std > _ROUNDING else 0.0)

    def apply(self, value: float) -> float:
        """Returns the value in standard deviations from the mean."""
        return (value / self.unit - self.mean) / self.std if self.std else 0.0


def scales(samples: Iterable[Sequence[Part]]) -> dict[str, Scale]:
    """Returns the scale of each component over the samples to train."""
    values: dict[str, list[float]] = {}
    for parts in samples:
        for name, value, _ in parts:
            values.setdefault(name, []).append(value)
    return {name: Scale.of(of_component) for name, of_component in values.items()}


def normalized(reward: float, parts: Sequence[Part], by_name: Mapping[str, Scale]) -> float:
    """Returns a sample's reward with its components normalised; those without a scale are unchanged."""
    terms = [reward]
    for name, value, weight in parts:
        if name in by_name:
            terms += [-(weight * value), weight * by_name[name].apply(value)]
    return math.fsum(terms)
