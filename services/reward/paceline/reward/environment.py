"""The environment's own reward as a scorer: one more component, for trajectories that bring one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from paceline.core.scoring import ScoreItem
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.reward.scoring.scores import Score

NAME = "environment"
"""Name of the reward's component; further components are `environment/NAME`."""


class EnvironmentReward:
    """A `Scorer` that returns the reward of an episode's environment; without one, it adds 0.

    Args:
        weight: the factor of the environment's reward in the sum.
    """

    names: Sequence[str] = (NAME,)

    def __init__(self, weight: float) -> None:
        self._weight = weight

    @classmethod
    def configured(cls, settings: ScorerSettings) -> list[Self]:
        """Returns one scorer in any case; the item itself shows whether it has such a reward."""
        return [cls(settings.config.environment_weight)]

    async def start(self) -> None:
        """Does nothing: there is nothing to start."""

    async def score(self, items: Sequence[ScoreItem], *, run_id: str = "", step: int = 0) -> list[Score]:
        """Returns one score per item, in the order of the items."""
        return [self._score(item) for item in items]

    def _score(self, item: ScoreItem) -> Score:
        episode = item.episode
        if episode is None:
            return Score(trajectory_id=item.trajectory_id, reward=0.0)
        further = {f"{NAME}/{name}": value for name, value in episode.components.items()}
        if episode.reward is None:
            return Score(trajectory_id=item.trajectory_id, reward=0.0, components=further)
        return Score(
            trajectory_id=item.trajectory_id,
            reward=self._weight * episode.reward,
            components={NAME: episode.reward, **further},
        )

    async def close(self) -> None:
        """Does nothing: there is nothing to close."""
