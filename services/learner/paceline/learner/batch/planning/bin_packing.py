"""Packs bundles of rows into bins: as few bins as a token budget allows, of nearly equal arithmetic."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """Rows that stay together, with their tokens and their arithmetic."""

    rows: tuple[int, ...]
    num_tokens: int
    cost: int


Bin = tuple[Bundle, ...]


def pack_bins(bundles: Sequence[Bundle], *, multiple: int, budget: int) -> list[Bin]:
    """Fills bins of at most `budget` tokens; their number is a multiple of `multiple`, and some may be empty.

    There are no more bins than first-fit filling needs. If bundles spread evenly do not fit into as many, the
    first-fit result is returned.
    """
    filled = _first_fit(bundles, budget)
    count = -(-len(filled) // multiple) * multiple
    return _pack_evenly(bundles, count, budget) or [*filled, *[()] * (count - len(filled))]


def _pack_evenly(bundles: Sequence[Bundle], num_bins: int, budget: int) -> list[Bin]:
    """Packs each bundle, the costliest first, into the cheapest bin with space; [] if one finds no space."""
    bins: list[list[Bundle]] = [[] for _ in range(num_bins)]
    open_bins = _BinsBySpace(budget, range(num_bins))
    for bundle in sorted(bundles, key=lambda b: (-b.cost, b.rows)):
        taken = open_bins.take(bundle.num_tokens)
        if taken is None:
            return []
        space, (cost, place) = taken
        bins[place].append(bundle)
        open_bins.put(space - bundle.num_tokens, (cost + bundle.cost, place))
    return [tuple(bundles) for bundles in bins]


def _first_fit(bundles: Sequence[Bundle], budget: int) -> list[Bin]:
    """Packs each bundle, the one with the most tokens first, into the first bin with space."""
    bins: list[list[Bundle]] = [[]]
    open_bins = _BinsBySpace(budget, range(1))
    for bundle in sorted(bundles, key=lambda b: (-b.num_tokens, b.rows)):
        space, (_, place) = open_bins.take(bundle.num_tokens) or (budget, (0, len(bins)))
        if place == len(bins):
            bins.append([])
        bins[place].append(bundle)
        open_bins.put(space - bundle.num_tokens, (0, place))
    return [tuple(bundles) for bundles in bins]


_Key = tuple[int, int]
"""A bin's cost and its place."""


class _BinsBySpace:
    """Finds the cheapest bin with enough space (the first of equal ones) in log(budget) steps.

    A heap of bins for each space, from 0 to `budget`, and a tree of the minima above them.

    Args:
        budget: space of an empty bin.
        places: places of the bins, which are empty and cost nothing.
    """

    def __init__(self, budget: int, places: Sequence[int]) -> None:
        self._budget = budget
        self._width = 1 << budget.bit_length()  # above the budget
        self._least: list[_Key | None] = [None] * (2 * self._width)
        self._heaps: dict[int, list[_Key]] = {budget: [(0, place) for place in places]}
        self._renew(budget)

    def take(self, space: int) -> tuple[int, _Key] | None:
        """Takes the bin out and returns its space and its key; None if no bin has `space`."""
        if space > self._budget:
            return None
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
        if space >= 0:
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
