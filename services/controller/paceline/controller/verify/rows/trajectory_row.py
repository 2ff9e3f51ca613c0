"""A row that a file of trajectories must have according to the journal."""

from __future__ import annotations

from typing import NamedTuple

from paceline.controller.verify.findings import JournalEntry
from paceline.core.ids import TrajectoryId
from paceline.core.policy import PolicyRange, PolicyTag


class TrajectoryRow(NamedTuple):
    """One trajectory: its id, the digest of its blob, and its reward before and after normalising.

    `policy` sampled its first token (None: that of its step); `ranges` are there where it did not sample all.
    """

    key: TrajectoryId
    digest: str
    reward: float
    raw_reward: float
    policy: PolicyTag | None = None
    ranges: tuple[PolicyRange, ...] = ()


def ranges_of(entry: JournalEntry) -> tuple[PolicyRange, ...]:
    """The ranges of an admitted trajectory; () where one policy sampled all of it."""
    return tuple(PolicyRange.from_plain(plain) for plain in entry.get("ranges") or ())


def oldest_of(entry: JournalEntry) -> PolicyTag:
    """The policy that sampled the first token of an admitted trajectory."""
    return PolicyTag.parse(str(entry.get("policy")))
