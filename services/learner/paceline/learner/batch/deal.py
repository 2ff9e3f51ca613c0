"""Deals bundles of rows to bins: as few bins as a token budget allows, of nearly equal arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """Rows that stay together, with their tokens and their arithmetic."""

    rows: tuple[int, ...]
    num_tokens: int
    cost: int


Bin = tuple[Bundle, ...]


def deal(bundles: Sequence[Bundle], *, multiple: int, budget: int) -> list[Bin]:
    """Fills bins of at most `budget` tokens, the number of bins a multiple of `multiple`, some maybe empty.

    There are no more bins than filling them one after the other takes. If the bundles do not fit into as many
    evenly, they stay as they were filled.
    """
    filled = _first_fit(bundles, budget)
    count = -(-len(filled) // multiple) * multiple
    return _deal_evenly(bundles, count, budget) or [*filled, *[()] * (count - len(filled))]


def _deal_evenly(bundles: Sequence[Bundle], num_bins: int, budget: int) -> list[Bin]:
    """The costliest bundle first, each to the cheapest bin with room; [] if a bundle finds no room."""
    bins: list[list[Bundle]] = [[] for _ in range(num_bins)]
    costs, room = [0] * num_bins, [budget] * num_bins
    for bundle in sorted(bundles, key=lambda b: (-b.cost, b.rows)):
        fitting = [place for place in range(num_bins) if room[place] >= bundle.num_tokens]
        if not fitting:
            return []
        place = min(fitting, key=costs.__getitem__)
        bins[place].append(bundle)
        costs[place] += bundle.cost
        room[place] -= bundle.num_tokens
    return [tuple(bundles) for bundles in bins]


def _first_fit(bundles: Sequence[Bundle], budget: int) -> list[Bin]:
    """The bundle with the most tokens first, each into the first bin with room."""
    bins: list[list[Bundle]] = [[]]
    room = [budget]
    for bundle in sorted(bundles, key=lambda b: (-b.num_tokens, b.rows)):
        place = next((b for b, free in enumerate(room) if free >= bundle.num_tokens), None)
        if place is None:
            bins.append([])
            room.append(budget)
            place = len(bins) - 1
        bins[place].append(bundle)
        room[place] -= bundle.num_tokens
    return [tuple(bundles) for bundles in bins]
