"""A reward that random weights earn, and in different amounts: for runs that test the machinery."""

from __future__ import annotations


def letters(response: str, ground_truth: str) -> float:
    """The share of letters in the response; about a third of random tokens are letters."""
    return sum(c.isascii() and c.isalpha() for c in response) / max(1, len(response))
