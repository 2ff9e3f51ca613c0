"""Sequences of many lengths, with prefixes, in one packed row."""

from __future__ import annotations

import numpy as np


def many(seed: int, *, longest: int) -> tuple[list[int], list[int | None]]:
    """Lengths and prefixes: prompts with some responses each, and sequences by themselves."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    prefixes: list[int | None] = []
    for _ in range(12):
        prompt = len(lengths)
        lengths.append(int(rng.integers(1, longest)))
        prefixes.append(None)
        for _ in range(int(rng.integers(0, 5))):
            lengths.append(int(rng.integers(1, longest)))
            prefixes.append(prompt)
    return lengths, prefixes
