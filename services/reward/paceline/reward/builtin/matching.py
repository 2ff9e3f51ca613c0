"""Reward by comparing strings."""

from __future__ import annotations


def exact_match(response: str, ground_truth: str, *, ignore_case: bool = False, **extra: object) -> float:
    """Scores 1.0 when the response is the ground truth, surrounding white space aside, and 0.0 otherwise.

    Args:
        response: the decoded response.
        ground_truth: the text that is right.
        ignore_case: compare without regard to case.
        extra: the item's other fields, unused.
    """
    given, wanted = response.strip(), ground_truth.strip()
    if ignore_case:
        given, wanted = given.casefold(), wanted.casefold()
    return float(given == wanted)
