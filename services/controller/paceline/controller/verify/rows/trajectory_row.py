"""Trajectories of the journal: their admissions, and the rows that files of trajectories must have."""

from __future__ import annotations

from typing import NamedTuple

from paceline.controller.verify.findings import Findings, JournalEntry
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


class Admissions:
    """The admitted trajectories of a step's collection or a validation.

    Attributes:
        entries: the first admission of each trajectory.
    """

    def __init__(self) -> None:
        self.entries: dict[TrajectoryId, JournalEntry] = {}
        self._digests: dict[str, TrajectoryId] = {}

    def add(self, key: TrajectoryId, entry: JournalEntry, findings: Findings) -> bool:
        """Notes an admission and what is wrong with it; returns whether it is the trajectory's first one."""
        is_new, digest = key not in self.entries, str(entry.get("digest"))
        if not entry.get("digest") or entry.get("reward") is None:
            findings.i3(f"{key} was admitted without a digest or a reward", entry)
        if not is_new:
            findings.i3(f"{key} was admitted twice", self.entries[key], entry)
        elif (twin := self._digests.get(digest)) is not None:
            # The digest also covers id and seed, so equal answers have different digests.
            findings.i3(f"{key} has the digest of {twin}", self.entries[twin], entry)
        self.entries.setdefault(key, entry)
        self._digests.setdefault(digest, key)
        return is_new


def ranges_of(entry: JournalEntry) -> tuple[PolicyRange, ...]:
    """Returns the ranges of an admitted trajectory; () if one policy sampled all of it."""
    return tuple(PolicyRange.from_plain(plain) for plain in entry.get("ranges") or ())


def oldest_of(entry: JournalEntry) -> PolicyTag:
    """Returns the policy that sampled the first token of an admitted trajectory."""
    return PolicyTag.parse(str(entry.get("policy")))
