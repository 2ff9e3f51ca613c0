"""Scores each step of an answer, from outside the run: `python examples/arithmetic/steps.py HOST:PORT`.

The answer "units 12: 52" has two steps. The first earns a quarter if it is the sum of the units, at its
last token; the second earns 1 if it is the sum, at the answer's end. An
answer without a colon has the second alone.
"""

from __future__ import annotations

import re
import sys

from paceline.sdk import attach_reward

UNITS_REWARD = 0.25


def steps(response: str, ground_truth: str, prompt: str) -> dict[str, object]:
    """The reward of an answer, its parts where they belong, and whether each step is right."""
    first, colon, _ = response.partition(":")
    operands = [int(number) for number in re.findall(r"\d+", prompt)]
    units = bool(colon) and re.findall(r"\d+", first) == [str(sum(number % 10 for number in operands))]
    total = re.findall(r"\d+", response)[-1:] == [ground_truth]
    parts = {len(first) + 1: UNITS_REWARD * units} if colon else {}
    if response:
        parts[len(response)] = parts.get(len(response), 0.0) + total
    score = UNITS_REWARD * units + total
    return {"score": score, "placed": sorted(parts.items()), "units": float(units), "total": float(total)}


if __name__ == "__main__":
    attach_reward(steps, address=sys.argv[1], name="steps")
