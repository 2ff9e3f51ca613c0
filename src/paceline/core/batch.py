"""One row of a training batch: where a trajectory's arrays lie and what it scored."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.ids import TrajectoryId


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRow:
    """What the learner needs to fetch and place one trajectory.

    `reward` is the sum of the weighted components, `greedy_score` that of the greedy answer to the same prompt, where there is one.
    """

    trajectory_id: TrajectoryId
    blob_key: str
    reward: float
    num_prompt_tokens: int
    num_response_tokens: int
    greedy_score: float | None = None
