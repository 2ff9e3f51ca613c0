"""The run's reward: the sum of all configured scorers, and the registry of the kinds of scorers."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Self

from paceline.config.reward import TOTALS
from paceline.core.errors import ConfigError, RewardErrorKind
from paceline.core.scoring import ScoreItem
from paceline.reward.attached.scorer import AttachedScorer
from paceline.reward.code.scorer import CodeScorer
from paceline.reward.environment import EnvironmentReward
from paceline.reward.functions.pool import FunctionPool
from paceline.reward.judge.scorer import JudgeScorer
from paceline.reward.remote.scorer import RemoteScorer
from paceline.reward.scoring.scorer import Scorer, ScorerSettings
from paceline.reward.scoring.scores import Score, failed
from paceline.reward.scoring.shape import Shape
from paceline.reward.scoring.shaped import Part, Shaped
from paceline.service.observability.metrics import Observation

_log = logging.getLogger(__name__)

PARTS: tuple[Callable[[ScorerSettings], Sequence[Part]], ...] = (
    RemoteScorer.configured,
    AttachedScorer.configured,
    JudgeScorer.configured,
    CodeScorer.configured,
)
"""Each builds the scorers of its kind that are configured, possibly none; `Shaped` applies their shapes."""

KINDS: tuple[Callable[[ScorerSettings], Sequence[Scorer]], ...] = (
    FunctionPool.configured,
    EnvironmentReward.configured,
)
"""The same for kinds that apply the shapes of their functions themselves, or have none."""


class WeightedSum:
    """A `Scorer` that sums all scorers that `reward.*` names.

    Args:
        minimum, maximum: the range that the sum must lie in.
        normalized: shapes of the scorers whose components the controller normalises, by name.

    Attributes:
        attached: the scorers of attached clients.

    Raises:
        ConfigError: two scorers share a name, or a name is empty or holds a slash.
    """

    def __init__(
        self,
        scorers: Sequence[Scorer],
        *,
        minimum: float,
        maximum: float,
        normalized: Mapping[str, Shape] | None = None,
    ) -> None:
        self._normalized = normalized or {}
        self._scorers, self._minimum, self._maximum = tuple(scorers), minimum, maximum
        self.names = [name for scorer in scorers for name in scorer.names]
        check_names(self.names)
        inner = [scorer.inner for scorer in scorers if isinstance(scorer, Shaped)]
        self.attached = [scorer for scorer in inner if isinstance(scorer, AttachedScorer)]

    @classmethod
    def configured(cls, settings: ScorerSettings) -> Self:
        """Builds the scorers of a configuration; raises what the class raises."""
        parts = [Shaped(scorer) for build in PARTS for scorer in build(settings)]
        scorers = [*parts, *(scorer for build in KINDS for scorer in build(settings))]
        config = settings.config
        shapes = {name: Shape.configured(scorer) for name, scorer in config.named_scorers.items()}
        return cls(
            scorers,
            minimum=config.min_reward,
            maximum=config.max_reward,
            normalized={name: shape for name, shape in shapes.items() if shape.is_normalized},
        )

    def queues(self) -> list[Observation]:
        """Returns how many items wait for each scorer; may be called from any thread."""
        queues: Counter[str] = Counter()
        for scorer in self._scorers:
            if isinstance(scorer, Shaped | FunctionPool):
                queues[scorer.queue_name] += scorer.num_unscored
        return [(number, {"scorer": name}) for name, number in queues.items()]

    async def start(self) -> None:
        """Starts all scorers; a remote service may come up later.

        Raises:
            ConfigError: a function cannot be found, imported or called.
            DeadlineError, PeerLostError: a child process hung or died while importing.
        """
        await asyncio.gather(*(scorer.start() for scorer in self._scorers))

    async def score(self, items: Sequence[ScoreItem], *, run_id: str = "", step: int = 0) -> list[Score]:
        """Returns one score per item, in the order of the items."""
        if not items:
            return []
        parts = [scorer.score(items, run_id=run_id, step=step) for scorer in self._scorers]
        columns = await asyncio.gather(*parts)
        scores = [
            add_scores(row, minimum=self._minimum, maximum=self._maximum)
            for row in zip(*columns, strict=True)
        ]
        if self._normalized:
            scores = [self._with_parts(item, score) for item, score in zip(items, scores, strict=True)]
        errors = Counter(score.error for score in scores if score.error is not None)
        for (kind, message), count in errors.most_common(3):
            _log.warning("%d of %d items not scored (%s): %s", count, len(items), kind.value, message)
        return scores

    def _with_parts(self, item: ScoreItem, score: Score) -> Score:
        """Returns the score with the fields from which the controller normalises components."""
        parts = tuple(
            (name, shape.clipped(score.components[name]), shape.weight_of(item))
            for name, shape in self._normalized.items()
            if score.error is None and name in score.components
        )
        return replace(score, normalized=parts) if parts else score

    async def close(self) -> None:
        """Closes all scorers of the sum."""
        for scorer in reversed(self._scorers):
            await scorer.close()


def check_names(names: Sequence[str]) -> None:
    """Refuses names of scorers that would make components ambiguous.

    Raises:
        ConfigError: a name is empty, occurs twice or holds a slash.
    """
    seen: set[str] = set()
    for name in names:
        if not name or "/" in name:
            raise ConfigError(
                f"reward: the name {name!r} must be non-empty and hold no slash, which separates a scorer's "
                "name from a key of the dict that it returns"
            )
        if name in TOTALS:
            raise ConfigError(
                f"reward: no scorer can be named {name!r}, which is another metric's name: give it another "
                "name"
            )
        if name in seen:
            raise ConfigError(f"reward: two scorers are named {name!r}: give one another name")
        seen.add(name)


def add_scores(parts: Sequence[Score], *, minimum: float, maximum: float) -> Score:
    """Adds the scores that several scorers gave for the same item; the first error, if any, is the result.

    Args:
        parts: at least one score, weights already applied.
        minimum, maximum: the range that the sum must lie in; outside it, the result is an OUT_OF_RANGE error.
    """
    trajectory_id = parts[0].trajectory_id
    seconds = max(part.seconds for part in parts)  # the scorers work at the same time
    components = {name: value for part in parts for name, value in part.components.items()}
    placed = tuple(sorted(pair for part in parts for pair in part.placed))
    reward = 0.0
    for part in parts:
        if part.reward is None:
            return Score(trajectory_id=trajectory_id, reward=None, error=part.error, seconds=seconds)
        reward += part.reward
    if not minimum <= reward <= maximum:
        message = (
            f"the reward {reward:g} lies outside [reward.min_reward, reward.max_reward] = "
            f"[{minimum:g}, {maximum:g}]"
        )
        return failed(trajectory_id, RewardErrorKind.OUT_OF_RANGE, message, seconds)
    return Score(
        trajectory_id=trajectory_id, reward=reward, components=components, seconds=seconds, placed=placed
    )
