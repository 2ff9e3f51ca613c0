"""Rewards for runs of a model with random weights: one that gives signal, one that misbehaves for some prompts."""

from __future__ import annotations

import math
import time
from pathlib import Path


def letters(response: str, ground_truth: str) -> dict[str, float]:
    """Share of letters among the first characters of the response; random tokens are about a third letters."""
    share = sum(c.isascii() and c.isalpha() for c in response) / max(1, len(response))
    return {"score": share, "length": float(len(response))}


def first_letter(response: str, ground_truth: str) -> float:
    """1 for a response that begins with a letter: small groups often have equal scores."""
    return float(response[:1].isalpha())


def moody(response: str, ground_truth: str, *, faults_file: str) -> object:
    """As `letters`, but for ground truths that the file names now ("39=raise,108=nan"; "*=raise" means all)."""
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
