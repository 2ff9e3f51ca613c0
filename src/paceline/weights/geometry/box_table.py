"""Numbers for boxes: layers repeat, so a plan of hundreds of thousands of pieces has few different boxes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.weights.geometry.boxes import Box

IntArray = npt.NDArray[np.int64]


class BoxTable:
    """Different boxes, numbered in the order in which they came."""

    def __init__(self) -> None:
        self._numbers: dict[Box, int] = {}
        self.boxes: list[Box] = []

    def add(self, box: Box) -> int:
        """Returns the number of a box, a new one if needed."""
        number = self._numbers.setdefault(box, len(self.boxes))
        if number == len(self.boxes):
            self.boxes.append(box)
        return number

    def volumes(self) -> IntArray:
        """Returns the number of elements of each box."""
        return np.array([box.volume for box in self.boxes], dtype=np.int64)

    def row_volumes(self) -> IntArray:
        """Elements of a row of each box: of one index of dimension 0."""
        return np.array([box.volume // box.shape[0] for box in self.boxes], dtype=np.int64)

    def ranks(self) -> IntArray:
        """The place of each box if they were sorted."""
        order = sorted(range(len(self.boxes)), key=lambda number: self.boxes[number])
        ranks = np.empty(len(order), dtype=np.int64)
        ranks[order] = np.arange(len(order))
        return ranks
