"""A scorer around another one: its items only, remembered if asked for, and maybe allowed to fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.core.scoring import ScoreItem
from paceline.reward.scoring.cached import Cached
from paceline.reward.scoring.scorer import Scorer
from paceline.reward.scoring.scores import Score
from paceline.reward.scoring.shape import Shape


class Shaped:
    """A `Scorer` that gives another one its items only, and counts an error as 0 where it is not required.

    `num_unscored` is how many items it has been asked about and has no score for yet.
    """

    def __init__(self, scorer: Scorer, shape: Shape) -> None:
        self.inner, self._shape = scorer, shape
        self.num_unscored = 0
        self.scorer = Cached(scorer, shape.cache_size) if shape.cache_size else scorer

    @property
    def names(self) -> Sequence[str]:
        """The names of the components that the scorer gives."""
        return self.scorer.names

    @property
    def queue_name(self) -> str:
        """What its queue is called."""
        return self.names[0]

    async def start(self) -> None:
        """Starts the scorer whose scores are shaped."""
        await self.scorer.start()

    async def close(self) -> None:
        """Closes the scorer whose scores are shaped."""
        await self.scorer.close()

    async def score(self, items: Sequence[ScoreItem], *, run_id: str = "", step: int = 0) -> list[Score]:
        """One score per item, in the order of the items; 0 without components for other data sources.

        Raises:
            RewardError: UNAVAILABLE, as the scorer.
        """
        own = [self._asked(item) for item in items if self._shape.takes(item)]
        self.num_unscored += len(own)
        try:
            scores = iter(await self.scorer.score(own, run_id=run_id, step=step) if own else [])
        finally:
            self.num_unscored -= len(own)
        return [
            self._judged(next(scores))
            if self._shape.takes(item)
            else Score(trajectory_id=item.trajectory_id, reward=0.0)
            for item in items
        ]

    def _asked(self, item: ScoreItem) -> ScoreItem:
        """The item; without its group for a scorer that may get its siblings in other calls."""
        return replace(item, group="") if item.group and not self._shape.group else item

    def _judged(self, score: Score) -> Score:
        if self._shape.required:
            return score
        failed = f"{self.scorer.names[0]}/failed"
        if score.error is None:
            return replace(score, components={**score.components, failed: 0.0})
        return replace(score, reward=0.0, error=None, components={failed: 1.0}, placed=())
