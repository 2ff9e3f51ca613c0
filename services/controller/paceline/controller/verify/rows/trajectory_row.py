"""A row that a file of trajectories must have according to the journal."""

from __future__ import annotations

from typing import NamedTuple

from paceline.controller.verify.findings import JournalEntry
from paceline.core.ids import TrajectoryId
from paceline.core.policy import PolicyRange, PolicyTag


class TrajectoryRow(NamedTuple):
    """One trajectory: its id, the digest of its blob, and its reward before and after normalising.

    `policy` sampled its first token (None: the step's policy); `ranges` is empty if it sampled all of them.
    """

    key: TrajectoryId
    digest: str
    reward: float
    raw_reward: float
    policy: PolicyTag | None = None
    ranges: tuple[PolicyRange, ...] = ()


def ranges_of(entry: JournalEntry) -> tuple[PolicyRange, ...]:
    """Returns the ranges of an admitted trajectory; () if one policy sampled all of it."""
    return tuple(PolicyRange.from_plain(plain) for plain in entry.get("ranges") or ())


def oldest_of(entry: JournalEntry) -> PolicyTag:
    """Returns the policy that sampled the first token of an admitted trajectory."""
    return PolicyTag.parse(str(entry.get("policy")))
