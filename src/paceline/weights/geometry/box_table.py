"""Numbers boxes: layers repeat, so a plan of hundreds of thousands of pieces has few different boxes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.weights.geometry.boxes import Box

IntArray = npt.NDArray[np.int64]


class BoxTable:
    """Numbers distinct boxes in the order in which they are added."""

    def __init__(self) -> None:
        self._numbers: dict[Box, int] = {}
        self.boxes: list[Box] = []
        self._volumes = np.zeros(0, dtype=np.int64)

    def add(self, box: Box) -> int:
        """Returns the number of a box, a new one if needed."""
        number = self._numbers.setdefault(box, len(self.boxes))
        if number == len(self.boxes):
            self.boxes.append(box)
        return number

    def volumes(self) -> IntArray:
        """Returns the number of elements of each box; computes only boxes added since the last call."""
        if len(self._volumes) < len(self.boxes):
            added = [box.volume for box in self.boxes[len(self._volumes) :]]
            self._volumes = np.concatenate([self._volumes, np.array(added, dtype=np.int64)])
        return self._volumes

    def row_volumes(self) -> IntArray:
        """Returns the elements per row of each box, a row being one index of dimension 0."""
        return np.array([box.volume // box.shape[0] for box in self.boxes], dtype=np.int64)
