"""Scores each step of an answer as an attached client: `python examples/arithmetic/steps.py HOST:PORT`.

The answer "units 12: 52" has two steps. The first earns 0.25 at its last token if it is the sum of the units;
the second earns 1 at the end of the answer if it is the sum. An answer without a colon has only the second
step.
"""

from __future__ import annotations

import re
import sys

from paceline.sdk import attach_reward

UNITS_REWARD = 0.25


def steps(response: str, ground_truth: str, prompt: str) -> dict[str, object]:
    """Returns the reward of an answer, the positions of its parts, and whether each step is right."""
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
