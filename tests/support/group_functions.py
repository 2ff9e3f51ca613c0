"""Functions that score the samples of a prompt together."""

from __future__ import annotations

import os
import time

from paceline.core.scoring import ScoreItem


def rank(items: list[ScoreItem]) -> list[float]:
    """The place of each response by its length, from 0; does what a response says first."""
    orders = {item.response for item in items}
    if "raise" in orders:
        raise KeyError("raise")
    if "hang" in orders:
        time.sleep(60)
    if "exit" in orders:
        os._exit(3)
    if "short" in orders:
        return [0.0]
    by_length = sorted(len(item.response) for item in items)
    return [float("nan") if item.response == "nan" else by_length.index(len(item.response)) for item in items]


def scaled(items: list[ScoreItem], *, factor: float) -> list[float]:
    """The number of siblings, times a factor."""
    return [factor * len(items)] * len(items)


def is_of_set(items: list[ScoreItem]) -> list[float]:
    """1 where the samples belong to the set "hard"."""
    return [float(item.val_set == "hard") for item in items]


def without_items(*, factor: float) -> list[float]:
    """Takes no items."""
    return [factor]
