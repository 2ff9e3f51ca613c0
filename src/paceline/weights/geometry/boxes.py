"""Defines boxes: half-open ranges, one per dimension, in the index space of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, gt, le, sub


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements with start[d] <= index[d] < stop[d] in every dimension d.

    Comparing or combining boxes with different numbers of dimensions raises ValueError.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"box: start {self.start} and stop {self.stop} differ in length")
        # A plan makes a million boxes: operators are mapped, because generators take several times as long.
        if min(self.start, default=0) < 0 or any(map(gt, self.start, self.stop)):
            raise ValueError(
                f"box: need 0 <= start <= stop in every dimension, got {self.start}..{self.stop}"
            )

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """Returns the box of all elements of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """How many indices the box has in each dimension."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def volume(self) -> int:
        """How many elements the box holds."""
        return math.prod(map(sub, self.stop, self.start))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects this box from an array."""
        return tuple(slice(low, high) for low, high in zip(self.start, self.stop, strict=True))

    def contains(self, other: Box) -> bool:
        """Returns whether every element of `other` lies in this box."""
        return other.volume == 0 or self.intersect(other) == other

    def intersect(self, other: Box) -> Box | None:
        """Returns the box of the common elements, or None if there are none."""
        if len(self.start) != len(other.start):
            raise ValueError(
                f"boxes of {len(self.start)} and {len(other.start)} dimensions cannot be intersected"
            )
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(map(le, stop, start)):
            return None
        return Box(start, stop)

    def translate(self, by: Sequence[int]) -> Box:
        """Returns the box, moved by one offset per dimension."""
        if len(by) != len(self.start):
            raise ValueError(f"a box of {len(self.start)} dimensions cannot be moved by {len(by)} offsets")
        return Box(tuple(map(add, self.start, by)), tuple(map(add, self.stop, by)))

    def relative_to(self, origin: Sequence[int]) -> Box:
        """Returns the same box in coordinates relative to `origin`."""
        return self.translate([-step for step in origin])

    def subtract(self, other: Box) -> list[Box]:
        """Returns this box without `other`: disjoint boxes in a fixed order, at most two per dimension."""
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
        """Returns the two parts along one dimension: below the absolute index `at`, and from it on."""
        low = Box(self.start, (*self.stop[:dim], at, *self.stop[dim + 1 :]))
        high = Box((*self.start[:dim], at, *self.start[dim + 1 :]), self.stop)
        return low, high
