"""Kinds of members of a run's fleet."""

from __future__ import annotations

import enum


class MemberKind(enum.Enum):
    """What a registered process does."""

    ROLLOUT = "rollout"
    LEARNER = "learner"
    REWARD = "reward"
