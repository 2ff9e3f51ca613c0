"""A guessing game over several turns: serve it, then start the run.

python examples/guess/environment.py &
paceline train examples/guess/grpo.yaml
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from paceline.sdk import Environment, Message, Observation, Outcome, serve_environment


class Guess(Environment):
    """The policy must find a digit; each guess is answered with "low" or "high" and lowers the reward."""

    async def open(self, task: Mapping[str, Any], *, task_seed: int, episode_seed: int) -> Observation:
        """Draws the digit, which is the same in all episodes of a prompt group."""
        self.digit, self.guesses, self.won = task_seed % 10, 0, False
        return Observation()

    async def step(self, action: Message) -> Observation:
        """Takes the answer as a guess."""
        self.guesses += 1
        text = action.content.strip()
        if len(text) != 1 or not text.isdigit():
            return Observation(done="no_digit")
        self.won = int(text) == self.digit
        if self.won:
            return Observation(done="won")
        return Observation(text="low" if int(text) < self.digit else "high")

    async def close(self, stop_reason: str) -> Outcome:
        """Grades the game: 1 for a hit at the first guess, 0.2 less per further guess, 0 for a loss."""
        reward = 1.2 - 0.2 * self.guesses if self.won else 0.0
        return Outcome(reward=reward, components={"won": float(self.won)})


if __name__ == "__main__":
    serve_environment(Guess, port=int(os.environ.get("PORT", "50071")), max_episodes=1024)
