"""The rewards of a run: the reward for training, and rewards of held-out sets that have their own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

from paceline.config.run import RunConfig
from paceline.config.validation import naming_set
from paceline.core.scoring import ScoreItem
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.reward.scoring.scores import Score
from paceline.reward.weighted_sum import WeightedSum
from paceline.service.observability.metrics import Observation


class RewardBySet:
    """A `Scorer` that scores each item by the reward of its set; items of other sets by the run's reward.

    Args:
        of_sets: the rewards of sets of data.val_sets, by set.

    Attributes:
        names, attached: as of the run's reward.
    """

    def __init__(self, general: WeightedSum, of_sets: Mapping[str, WeightedSum]) -> None:
        self._general, self._of_sets = general, dict(of_sets)
        self.names, self.attached = general.names, general.attached

    @classmethod
    def configured(cls, settings: ScorerSettings, config: RunConfig) -> Self:
        """Builds the rewards that a configuration describes; `settings` are those of the run's reward.

        Raises:
            ConfigError: as in `WeightedSum.configured`; names the set.
        """
        of_sets: dict[str, WeightedSum] = {}
        for name, reward in config.val_rewards.items():
            seed = None if settings.seed is None else f"{settings.seed}/{name}"
            with naming_set(name):
                of_sets[name] = WeightedSum.configured(replace(settings, config=reward, seed=seed))
        return cls(WeightedSum.configured(settings), of_sets)

    def queues(self) -> list[Observation]:
        """Returns how many items each scorer has still to score; any thread may ask."""
        of_sets = [
            (number, {"scorer": f"{name}: {labels['scorer']}"})
            for name, reward in self._of_sets.items()
            for number, labels in reward.queues()
        ]
        return [*self._general.queues(), *of_sets]

    async def start(self) -> None:
        """Starts the scorers of the run's reward and of every set.

        Raises:
            ConfigError, DeadlineError, PeerLostError: as in `WeightedSum.start`; a ConfigError names the set.
        """
        starting = [self._start_of_set(name, reward) for name, reward in self._of_sets.items()]
        await asyncio.gather(self._general.start(), *starting)

    async def _start_of_set(self, name: str, reward: WeightedSum) -> None:
        with naming_set(name):
            await reward.start()

    async def score(self, items: Sequence[ScoreItem], *, run_id: str = "", step: int = 0) -> list[Score]:
        """Returns one score per item, in the order of the items."""
        parts: dict[WeightedSum, list[ScoreItem]] = {}
        for item in items:
            parts.setdefault(self._reward_of(item), []).append(item)
        calls = [reward.score(own, run_id=run_id, step=step) for reward, own in parts.items()]
        answers = dict(zip(parts, map(iter, await asyncio.gather(*calls)), strict=True))
        return [next(answers[self._reward_of(item)]) for item in items]

    def _reward_of(self, item: ScoreItem) -> WeightedSum:
        return self._of_sets.get(item.val_set, self._general)

    async def close(self) -> None:
        """Closes the scorers of the run's reward and of every set."""
        for reward in (*self._of_sets.values(), self._general):
            await reward.close()
