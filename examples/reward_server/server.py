"""A reward server in ten lines: right answers score, short ones more. Then name it in reward.services."""

import os

from paceline.sdk import serve_reward


def brevity(response: str, ground_truth: str, **extra: object) -> dict[str, float]:
    """The share of a right answer's reward that its length leaves."""
    right = float(response.strip().endswith(ground_truth))
    return {"score": right / (1 + len(response) / 1000), "right": right}


if __name__ == "__main__":
    serve_reward(brevity, port=int(os.environ.get("PORT", "50061")))
