"""Boxes: half-open ranges, one per dimension, in the index space of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements with start[d] <= index[d] < stop[d] in every dimension d.

    Two boxes that are compared or combined must have the same number of dimensions; anything else is a
    mistake of the caller and raises ValueError.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"box: start {self.start} and stop {self.stop} differ in length")
        if any(low < 0 or low > high for low, high in zip(self.start, self.stop, strict=True)):
            raise ValueError(
                f"box: need 0 <= start <= stop in every dimension, got {self.start}..{self.stop}"
            )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that covers a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent per dimension."""
        return tuple(high - low for low, high in zip(self.start, self.stop, strict=True))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects this box from an array."""
        return tuple(slice(low, high) for low, high in zip(self.start, self.stop, strict=True))

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` lies in this box."""
        return other.volume == 0 or self.intersect(other) == other

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None where nothing is common."""
        if len(self.start) != len(other.start):
            raise ValueError(f"boxes of {len(self.start)} and {len(other.start)} dimensions do not meet")
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(low >= high for low, high in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def translate(self, by: Sequence[int]) -> Box:
        """The box moved by one offset per dimension."""
        return Box(
            tuple(low + step for low, step in zip(self.start, by, strict=True)),
            tuple(high + step for high, step in zip(self.stop, by, strict=True)),
        )

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The box in coordinates that count from `origin`."""
        return self.translate([-step for step in origin])

    def subtract(self, other: Box) -> list[Box]:
        """This box without `other`, as disjoint boxes in a fixed order (at most two per dimension)."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.volume else []
        rest: list[Box] = []
        start, stop = list(self.start), list(self.stop)
        for dim in range(len(start)):
            for low, high in ((start[dim], common.start[dim]), (common.stop[dim], stop[dim])):
                if low < high:
                    part = Box(
                        (*start[:dim], low, *start[dim + 1 :]),
                        (*stop[:dim], high, *stop[dim + 1 :]),
                    )
                    if part.volume:
                        rest.append(part)
            start[dim], stop[dim] = common.start[dim], common.stop[dim]
        return rest

    def split(self, dim: int, at: int) -> tuple[Box, Box]:
        """The parts below and from index `at` (absolute) on along one dimension."""
        low = Box(self.start, (*self.stop[:dim], at, *self.stop[dim + 1 :]))
        high = Box((*self.start[:dim], at, *self.start[dim + 1 :]), self.stop)
        return low, high
