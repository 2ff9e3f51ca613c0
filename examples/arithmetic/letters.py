"""A reward that even random weights earn, in varying amounts, to test runs without a trained model."""

from __future__ import annotations


def letters(response: str, ground_truth: str) -> float:
    """Returns the share of letters in the response; about a third of random tokens are letters."""
    return sum(c.isascii() and c.isalpha() for c in response) / max(1, len(response))
