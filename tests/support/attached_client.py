"""A scorer that attaches to a run: `python -m support.attached_client ADDRESS FILE`.

It scores as `training_rewards.letters` does, takes its time, and adds a byte to FILE for each item.
"""

from __future__ import annotations

import sys
import time

from paceline.sdk import attach_reward
from support.training_rewards import letters

SECONDS_PER_ITEM = 0.05


def slow_letters(response: str, ground_truth: str) -> dict[str, float]:
    """The same scores as `letters`."""
    time.sleep(SECONDS_PER_ITEM)
    with open(sys.argv[2], "ab") as file:
        file.write(b".")
    return letters(response, ground_truth)


if __name__ == "__main__":
    attach_reward(slow_letters, address=sys.argv[1], name="letters", max_concurrent=4)
