"""Packs bundles of rows into bins: as few bins as a token budget allows, of nearly equal arithmetic."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple


class Bundle(NamedTuple):
    """Rows that stay together, with their tokens and their arithmetic."""

    rows: tuple[int, ...]
    num_tokens: int
    cost: int


Bin = tuple[Bundle, ...]


def pack_bins(bundles: Sequence[Bundle], *, multiple: int, budget: int) -> list[Bin]:
    """Fills bins of at most `budget` tokens; their number is a multiple of `multiple`, and some may be empty.

    No bundle has more tokens than that.

    There are no more bins than first-fit filling needs. If bundles spread evenly do not fit into as many, the
    first-fit result is returned.
    """
    filled = _first_fit(bundles, budget)
    count = -(-len(filled) // multiple) * multiple
    return _pack_evenly(bundles, count, budget) or [*filled, *[()] * (count - len(filled))]


def _descending(bundles: Sequence[Bundle], field: int) -> list[Bundle]:
    """Sorts bundles by a field, the largest first, and equal ones by their rows."""
    # Two sorts by plain numbers are several times as fast as one by pairs.
    return sorted(sorted(bundles, key=itemgetter(0)), key=itemgetter(field), reverse=True)


def _pack_evenly(bundles: Sequence[Bundle], num_bins: int, budget: int) -> list[Bin]:
    """Packs each bundle, the costliest first, into the cheapest bin with space; [] if one finds no space."""
    bins: list[list[Bundle]] = [[] for _ in range(num_bins)]
    spaces = [budget] * num_bins
    # A heap of (cost, place) as one number, which is faster than pairs: cost * num_bins + place.
    keys = list(range(num_bins))
    ordered = _descending(bundles, 2)
    packed = 0
    # Nearly always the cheapest of all bins has space until none has, so a heap does most of the work.
    for bundle in ordered:
        _, num_tokens, cost = bundle
        place = keys[0] % num_bins
        if spaces[place] < num_tokens:
            break
        bins[place].append(bundle)
        spaces[place] -= num_tokens
        heapq.heapreplace(keys, keys[0] + cost * num_bins)
        packed += 1
    if packed == len(ordered):
        return list(map(tuple, bins))
    open_bins = _BinsBySpace(budget)
    for key in keys:
        open_bins.put(spaces[key % num_bins], divmod(key, num_bins))
    for bundle in ordered[packed:]:
        taken = open_bins.take(bundle.num_tokens)
        if taken is None:
            return []
        space, (cost, place) = taken
        bins[place].append(bundle)
        open_bins.put(space - bundle.num_tokens, (cost + bundle.cost, place))
    return list(map(tuple, bins))


def _first_fit(bundles: Sequence[Bundle], budget: int) -> list[Bin]:
    """Packs each bundle, the one with the most tokens first, into the first bin with space.

    Goes bin by bin, which gives the same: a bin takes each remaining bundle that fits, in order.
    """
    ordered = _descending(bundles, 1)
    sizes = [-bundle.num_tokens for bundle in ordered]
    end = len(ordered)
    # The first remaining bundle at or after a place, with shortcuts over those that are packed.
    following = list(range(end + 1))
    bins: list[Bin] = []
    head = 0
    while head < end:
        contents, space, at = [], budget, head
        while at < end:
            contents.append(ordered[at])
            space += sizes[at]
            following[at] = at + 1
            at = bisect_left(sizes, -space, at + 1)
            while following[at] != at:
                following[at] = at = following[following[at]]
        bins.append(tuple(contents))
        while following[head] != head:
            head = following[head]
    return bins or [()]


_Key = tuple[int, int]
"""A bin's cost and its place."""


class _BinsBySpace:
    """Finds the cheapest bin with enough space (the first of equal ones) in log(budget) steps.

    A heap of bins for each space, from 0 to `budget`, and a tree of the minima above them.

    Args:
        budget: space of an empty bin.
    """

    def __init__(self, budget: int) -> None:
        self._width = 1 << budget.bit_length()  # above the budget
        self._least: list[_Key | None] = [None] * (2 * self._width)
        self._heaps: dict[int, list[_Key]] = {}

    def take(self, space: int) -> tuple[int, _Key] | None:
        """Takes the bin out and returns its space and its key; None if no bin has `space`."""
        node, least = space + self._width, self._least
        best_node, best = node, least[node]
        while node > 1:
            if not node & 1:
                other = least[node + 1]
                if other is not None and (best is None or other < best):
                    best_node, best = node + 1, other
            node >>= 1
        if best is None:
            return None
        while best_node < self._width:
            best_node *= 2
            if least[best_node] is not best:
                best_node += 1
        space = best_node - self._width
        heapq.heappop(self._heaps[space])
        self._renew(space)
        return space, best

    def put(self, space: int, key: _Key) -> None:
        heapq.heappush(self._heaps.setdefault(space, []), key)
        self._renew(space)

    def _renew(self, space: int) -> None:
        heap, least = self._heaps[space], self._least
        node = space + self._width
        value = heap[0] if heap else None
        while least[node] is not value:
            least[node] = value
            if node == 1:
                return
            other = least[node ^ 1]
            if value is None or (other is not None and other < value):
                value = other
            node >>= 1
