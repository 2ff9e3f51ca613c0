"""Cuts a flow into chunks that fit into messages, along rows."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.columns import IntArray, padded, ranges


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunks:
    """The chunks of boxes, in order, as columns, and the messages that they fill.

    Attributes:
        item: index of the box to which a chunk belongs, (chunks,).
        start, shape: first index and extents of the chunk within that box, (chunks, dims).
        offset: the chunk's first element within its message.
        first: first chunk of each message, followed by the number of chunks, (messages + 1,).
    """

    item: IntArray
    start: IntArray
    shape: IntArray
    offset: IntArray
    first: IntArray
    sizes: IntArray


def cut_into_chunks(shapes: IntArray, size: int) -> Chunks:
    """Cuts boxes of these shapes, (boxes, dims), into chunks that fill messages of at most `size` elements.

    Boxes that fit uncut are placed in one step per message.
    """
    volumes = shapes.prod(axis=1)
    ends: list[int] = np.cumsum(volumes).tolist()
    # Runs of boxes that follow each other in one message: first item, count, whether cut, number, offset.
    runs: list[tuple[int, int, bool, int, int]] = []
    cuts: list[Box] = []
    at, number, filled, before = 0, 0, 0, 0
    while at < len(ends):
        until = bisect_right(ends, before + size - filled, at)
        if until > at:
            runs.append((at, until - at, False, number, filled))
            filled += ends[until - 1] - before
        else:
            stack = [Box.full(shapes[at].tolist())]
            while stack:
                fit, rest = take_leading(stack.pop(), size - filled, can_wait=filled > 0)
                stack += reversed(rest)
                if fit is None:
                    number, filled = number + 1, 0
                else:
                    runs.append((at, 1, True, number, filled))
                    cuts.append(fit)
                    filled += fit.volume
            until = at + 1
        at, before = until, ends[until - 1]
    return _expanded(shapes, volumes, np.array(runs, dtype=np.int64), cuts)


def _expanded(shapes: IntArray, volumes: IntArray, runs: IntArray, cuts: list[Box]) -> Chunks:
    """Expands rows per run into rows per chunk."""
    first, count, is_cut, number, offset = runs.T
    run, item = ranges(first, count)
    begins = np.cumsum(volumes) - volumes
    start, stop = np.zeros_like(shapes[item]), shapes[item]
    cut = np.flatnonzero(is_cut[run])
    start[cut] = padded([box.start for box in cuts], shapes.shape[1])
    stop[cut] = padded([box.stop for box in cuts], shapes.shape[1])
    messages = np.flatnonzero(np.diff(number[run], prepend=-1))
    return Chunks(
        item=item,
        start=start,
        shape=stop - start,
        offset=offset[run] + begins[item] - begins[first[run]],
        first=np.append(messages, len(item)),
        sizes=np.add.reduceat((stop - start).prod(axis=1), messages),
    )


def take_leading(box: Box, room: int, *, can_wait: bool) -> tuple[Box | None, list[Box]]:
    """Cuts the leading part that fits into `room` elements off a box; returns it and the rest.

    The part consists of complete rows if at least one fits. If none fits, a box that `can_wait` for an empty
    message is not cut; otherwise the row is cut along the next dimension.
    """
    volume = box.volume
    if volume <= room:
        return box, []
    for dim, extent in enumerate(box.shape):
        row = volume // extent
        if row <= room:
            fit, rest = box.split(dim, box.start[dim] + room // row)
            return fit, [rest]
        if can_wait:
            return None, [box]
        first, others = box.split(dim, box.start[dim] + 1)
        if others.volume:
            fit_first, rest_first = take_leading(first, room, can_wait=False)
            return fit_first, [*rest_first, others]
    raise AssertionError("a box of one element is larger than a round, which build_plan refuses")
