"""Defines the reward of the SmolLM2 example, which asks for the right number and nothing else."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"\d+")


def bare_number(response: str, ground_truth: str) -> dict[str, float]:
    """Returns 1 for just the right number, 0.5 for text ending in it, 0.2 for just a wrong number, else 0.

    Also reports `right`, whether the number is right, and `bare`, whether the response is only a number.
    """
    text = response.strip()
    numbers = _NUMBER.findall(text)
    is_bare = _NUMBER.fullmatch(text) is not None
    is_right = bool(numbers) and int(numbers[-1]) == int(ground_truth)
    if is_right:
        score = 1.0 if is_bare else 0.5
    else:
        score = 0.2 if is_bare else 0.0
    return {"score": score, "right": float(is_right), "bare": float(is_bare)}
