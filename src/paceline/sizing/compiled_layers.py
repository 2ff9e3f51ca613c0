"""Estimates what `actor.memory.recompute` saves and costs with compiled layers.

The compiler gets the share of activations that it may keep, and keeps those that cost most to recompute. The
numbers were measured with layers of 3B and 7B on an H100 (benchmarks/journal/gpus.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final

_BYTES: Final[Mapping[float, float]] = {1.0: 1.0, 0.9: 0.65, 0.5: 0.55, 0.25: 0.35, 0.0: 0.15}
_SECONDS: Final[Mapping[float, float]] = {1.0: 0.0, 0.9: 0.012, 0.5: 0.1, 0.25: 0.15, 0.0: 0.26}


def kept_bytes(kept_share: float) -> float:
    """Returns the share of activation bytes that layers really keep when they may keep `kept_share`.

    Below 1 they drop a third at once: the inputs of an MLP's last matrix, whose recomputation needs no matrix
    product.
    """
    return _interpolated(_BYTES, kept_share)


def recomputing(kept_share: float) -> float:
    """Returns the share of an update that recomputing adds.

    Between 0.9 and 0.5 the compiler may drop as much as at 0.5; with 7B it did so at 0.75.
    """
    return _interpolated(_SECONDS, kept_share)


def _interpolated(points: Mapping[float, float], place: float) -> float:
    for (low, at_low), (high, at_high) in itertools.pairwise(sorted(points.items())):
        if place <= high:
            return at_low + (at_high - at_low) * (place - low) / (high - low)
    return points[max(points)]
