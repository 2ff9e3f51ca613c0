"""Scores the samples of a prompt together: the shortest right answer is the best.

reward:
  functions:
    - {name: examples/arithmetic/ranking.py:shortest_right, group: true}
"""

from __future__ import annotations

from paceline.sdk import ScoreItem


def shortest_right(items: list[ScoreItem]) -> list[dict[str, float]]:
    """Returns 1 for the shortest right answer, down to 0.5 for the longest, and 0 for wrong answers."""
    right = [item.response.strip().endswith(item.ground_truth) for item in items]
    lengths = sorted({len(item.response) for item, is_right in zip(items, right, strict=True) if is_right})
    step = 0.5 / max(1, len(lengths) - 1)
    return [
        {
            "score": 1 - step * lengths.index(len(item.response)) if is_right else 0.0,
            "right": float(is_right),
        }
        for item, is_right in zip(items, right, strict=True)
    ]
