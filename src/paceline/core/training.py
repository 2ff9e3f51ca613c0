"""A training step as controller and learner exchange it: the rows of its batch, the order, and the result."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.guard import Adjustments, Reading
from paceline.core.ids import TrajectoryId
from paceline.core.policy import PolicyTag


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRow:
    """One trajectory of the batch: where its arrays lie, how long it is, what it scored.

    Attributes:
        blob_digest: of the blob's bytes, as the rollout server stored them.
        reward: sum of the weighted reward components.
        greedy_score: reward of the greedy answer to the same prompt; None where none was sampled.
    """

    trajectory_id: TrajectoryId
    blob_key: str
    blob_digest: str
    reward: float
    num_prompt_tokens: int
    num_response_tokens: int
    greedy_score: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOrder:
    """Asks for training step `step`, counted from 1, on rows that were all sampled from `policy`.

    Attributes:
        rows: ordered by (prompt id, sample index).
        adjustments: what the guard has changed of the configuration.
    """

    step: int
    policy: PolicyTag
    rows: tuple[BatchRow, ...]
    adjustments: Adjustments = field(default_factory=Adjustments)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a training step reports; the same on every rank, apart from timings.

    Attributes:
        skip_reasons: why optimizer steps were not taken, one entry per skipped step.
        readings: the guard's numbers, the worst of each rule and network.
    """

    step: int
    metrics: dict[str, float]
    skip_reasons: tuple[str, ...] = ()
    readings: tuple[Reading, ...] = ()
