"""Cuts items into calls of a remote service: by number and size, never within a group. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.scoring import ScoreItem, groups_of

Placed = tuple[int, ScoreItem]
"""An item with its place in the request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallItems:
    """The items of one call.

    Attributes:
        is_cut: whether they come from a larger call that failed.
        is_alone: whether they must not be merged, because a merged call with them failed.
    """

    items: Sequence[Placed]
    is_cut: bool = False
    is_alone: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Cutter:
    """Cuts items into calls that a service accepts.

    Args:
        max_chars: most characters of a call.
        by_group: whether items of a group stay together.
    """

    max_chars: int
    by_group: bool = False

    def cut(self, items: Sequence[Placed], size: int, *, is_cut: bool = False) -> list[CallItems]:
        """Returns parts of at most `size` items; a larger group is a part by itself."""
        parts: list[list[Placed]] = []
        chars = self.max_chars + 1
        for unit in self.units(items):
            unit_chars = sum(item.num_chars for _, item in unit)
            if chars + unit_chars > self.max_chars or len(parts[-1]) + len(unit) > size:
                parts.append([])
                chars = 0
            parts[-1] += unit
            chars += unit_chars
        return [CallItems(items=part, is_cut=is_cut) for part in parts]

    def units(self, items: Sequence[Placed]) -> list[list[Placed]]:
        """Returns the units that are never cut: single items, or groups."""
        if not self.by_group:
            return [[pair] for pair in items]
        return [[items[place] for place in places] for places in groups_of([item for _, item in items])]
