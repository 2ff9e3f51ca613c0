"""A row that a file of trajectories should have, as the journal says."""

from __future__ import annotations

from typing import NamedTuple

from paceline.core.ids import TrajectoryId


class TrajectoryRow(NamedTuple):
    """One trajectory: its id, the digest of its blob, and its reward before and after normalising."""

    key: TrajectoryId
    digest: str
    reward: float
    raw_reward: float
