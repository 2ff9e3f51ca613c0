"""What a scorer is asked and what it answers: the domain side of `RewardService.Score`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.core.episode import EpisodeOutcome


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreItem:
    """One response to be scored; of an episode the policy's last answer.

    `extra` holds the data row's other columns: values that JSON can express.
    """

    trajectory_id: str
    prompt: str
    response: str
    ground_truth: str
    data_source: str = ""
    extra: Mapping[str, object] = field(default_factory=dict)
    episode: EpisodeOutcome | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreResult:
    """A scorer's answer for one item: either `reward` is a finite number and `error` None, or the reverse."""

    trajectory_id: str
    reward: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
