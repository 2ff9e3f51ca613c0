"""A reward server in ten lines: scores right answers, short ones higher. List it in reward.services."""

import os

from paceline.sdk import serve_reward


def brevity(response: str, ground_truth: str, **extra: object) -> dict[str, float]:
    """Returns a reward for right answers that falls with their length."""
    right = float(response.strip().endswith(ground_truth))
    return {"score": right / (1 + len(response) / 1000), "right": right}


if __name__ == "__main__":
    serve_reward(brevity, port=int(os.environ.get("PORT", "50061")))
