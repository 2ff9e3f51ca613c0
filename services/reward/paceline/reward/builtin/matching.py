"""Reward by comparing strings."""

from __future__ import annotations


def exact_match(response: str, ground_truth: str, *, ignore_case: bool = False, **extra: object) -> float:
    """Scores 1.0 when response and ground truth are equal apart from surrounding white space, else 0.0.

    Args:
        response: the decoded response.
        ground_truth: the right text.
        ignore_case: whether upper and lower case count as equal.
        extra: the item's other fields, unused.
    """
    answer, truth = response.strip(), ground_truth.strip()
    if ignore_case:
        answer, truth = answer.casefold(), truth.casefold()
    return float(answer == truth)
