"""Kinds and states of the members of a run's fleet; a value is the word on the wire, in the journal and in `paceline status`."""

from __future__ import annotations

import enum


class MemberKind(enum.Enum):
    """What a registered process does."""

    ROLLOUT = "rollout"
    LEARNER = "learner"
    REWARD = "reward"


class RolloutState(enum.Enum):
    """What a rollout server is doing; its transitions are in `paceline.rollout.states`."""

    JOINING = "joining"
    STALE = "stale"
    SYNCING = "syncing"
    SERVING = "serving"


class LearnerState(enum.Enum):
    """What the learner group is doing."""

    LOADING = "loading"
    READY = "ready"
    TRAINING = "training"
    PUBLISHING = "publishing"
    SAVING = "saving"
    ROLLING_BACK = "rolling back"


class RewardState(enum.Enum):
    """What a reward service is doing."""

    STARTING = "starting"
    SERVING = "serving"


MemberState = RolloutState | LearnerState | RewardState

READY_STATES: frozenset[MemberState] = frozenset(
    {RolloutState.STALE, RolloutState.SERVING, LearnerState.READY, RewardState.SERVING}
)
"""States in which a member can be given work, or the weights that it needs for work."""

RECEIVABLE_STATES = frozenset({RolloutState.STALE, RolloutState.SYNCING, RolloutState.SERVING})
"""States in which a rollout server takes a push."""
