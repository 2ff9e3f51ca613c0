"""A scorer that applies the configured shape to another one: which items, a cache, whether it may fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from paceline.core.scoring import ScoreItem
from paceline.reward.scoring.cached import Cached
from paceline.reward.scoring.scorer import Scorer
from paceline.reward.scoring.scores import Score
from paceline.reward.scoring.shape import Shape


class Part(Scorer, Protocol):
    """A scorer with a place of its own in the sum."""

    @property
    def shape(self) -> Shape:
        """Returns its place in the sum."""


class Shaped:
    """A `Scorer` that gives another one only its items, and counts an error as 0 if it is not required.

    `num_unscored` is the number of items that wait for a score.
    """

    def __init__(self, scorer: Part) -> None:
        self.inner, self.names, self._shape = scorer, scorer.names, scorer.shape
        self.queue_name = self.names[0]
        size = self._shape.cache_size
        self._source: Scorer | Cached = Cached(scorer, size) if size else scorer
        self.num_unscored = 0

    async def start(self) -> None:
        """Starts the other scorer; raises as it does."""
        await self.inner.start()

    async def close(self) -> None:
        """Closes the scorer that this one wraps."""
        await self.inner.close()

    async def score(self, items: Sequence[ScoreItem], *, run_id: str = "", step: int = 0) -> list[Score]:
        """Returns one score per item, in the order of the items; 0 without components for other items."""
        own = [self._asked(item) for item in items if self._shape.takes(item)]
        self.num_unscored += len(own)
        try:
            scores = iter(await self._source.score(own, run_id=run_id, step=step) if own else [])
        finally:
            self.num_unscored -= len(own)
        return [
            self._judged(next(scores))
            if self._shape.takes(item)
            else Score(trajectory_id=item.trajectory_id, reward=0.0)
            for item in items
        ]

    def _asked(self, item: ScoreItem) -> ScoreItem:
        """Returns the item, without its group if the scorer may get the other samples in other calls."""
        return replace(item, group="") if item.group and not self._shape.group else item

    def _judged(self, score: Score) -> Score:
        if self._shape.required:
            return score
        failed = f"{self.names[0]}/failed"
        if score.error is None:
            return replace(score, components={**score.components, failed: 0.0})
        return replace(score, reward=0.0, error=None, components={failed: 1.0}, placed=())
