"""Rewards for runs of a model with random weights: two that give signal, one that fails for some prompts.

They run in the reward service's child processes.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

WAITS_AT_MOST_S = 600


def letters(response: str, ground_truth: str, *, late: str = "", until: str = "") -> dict[str, float]:
    """The share of letters in the response; about a third of random tokens are letters.

    Responses with the ground truth `late` wait for the file `until`, which keeps their step open.
    """
    deadline = time.monotonic() + WAITS_AT_MOST_S
    while late and ground_truth == late and not Path(until).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{until} was not written within {WAITS_AT_MOST_S} s")
        time.sleep(0.02)
    share = sum(c.isascii() and c.isalpha() for c in response) / max(1, len(response))
    return {"score": share, "length": float(len(response))}


def first_letter(response: str, ground_truth: str) -> float:
    """1 for a response that begins with a letter; small groups often have equal scores."""
    return float(response[:1].isalpha())


def num_chars(response: str, ground_truth: str) -> float:
    """The number of characters in the response."""
    return float(len(response))


def moody(response: str, ground_truth: str, *, faults_file: str) -> object:
    """As `letters`, but not for ground truths that the file names ("39=raise,108=nan"; "*=raise": all)."""
    table = dict(entry.split("=") for entry in Path(faults_file).read_text().split(","))
    match table.get(ground_truth, table.get("*")):
        case "raise":
            raise KeyError(f"no rubric for {ground_truth}")
        case "hang":
            time.sleep(3600)
        case "nan":
            return math.nan
        case "type":
            return "1.0"
    return letters(response, ground_truth)
