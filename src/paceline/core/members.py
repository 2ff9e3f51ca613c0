"""Kinds and states of the fleet's members; a value is the word on the wire and in the journal."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


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
    ASLEEP = "asleep"
    DRAINING = "draining"


class EnginePart(enum.Enum):
    """A part of an engine's GPU memory that the engine can release and take again."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


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
    DRAINING = "draining"


MemberState = RolloutState | LearnerState | RewardState

READY_STATES: frozenset[MemberState] = frozenset(
    {RolloutState.STALE, RolloutState.SERVING, LearnerState.READY, RewardState.SERVING}
)
"""States in which a member can be given work, or the weights that the work needs."""

STARTING_STATES: frozenset[MemberState] = frozenset(
    {RolloutState.JOINING, LearnerState.LOADING, RewardState.STARTING}
)
"""States in which a member imports modules or loads a model; both can delay its heartbeats for seconds"""

RECEIVABLE_STATES = frozenset(
    {RolloutState.STALE, RolloutState.SYNCING, RolloutState.SERVING, RolloutState.ASLEEP}
)
"""States of the rollout servers that take part in a push; a server that is asleep is woken for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUsage:
    """How much of a GPU is in use, by any process.

    Attributes:
        utilisation: share of the driver's last period in which a kernel ran.
    """

    uuid: str
    utilisation: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """The resources that a process and its children use on their machine.

    Attributes:
        cpu_seconds: CPU time since they started.
        memory_bytes: resident memory; a shared page counts once per process.
        gpus: GPUs that the process may use.
    """

    cpu_seconds: float
    memory_bytes: int
    gpus: tuple[GpuUsage, ...] = ()


@dataclass(frozen=True, slots=True)
class RankRef:
    """A rank of a weight group; str() is its name in sentences.

    Attributes:
        kind: LEARNER or ROLLOUT; None if unknown.
        number: its index among the ranks of that kind; None if unknown.
    """

    kind: MemberKind | None
    number: int | None = None

    def __str__(self) -> str:
        if self.kind is None:
            return "some member of the weight group"
        return (
            f"some {self.kind.value} rank" if self.number is None else f"{self.kind.value} rank {self.number}"
        )


SOME_MEMBER = RankRef(None)
"""Some other member of the weight group"""


class LocalPart(enum.Enum):
    """A part of the reporting member, which an error names when the failure is the member's own."""

    ENGINE = "the engine"
    DEVICE = "the device"

    def __str__(self) -> str:
        return self.value


Peer = str | RankRef | LocalPart
"""What an error blames: a rank of a weight group, a part of the reporting member, a member by its id, or
anything else by its name."""


def peer_to_plain(peer: Peer) -> str | list[str | int | None]:
    """Returns a peer as values that JSON and msgpack carry."""
    match peer:
        case RankRef():
            return [peer.kind and peer.kind.value, peer.number]
        case LocalPart():
            return [_LOCAL, peer.value]
        case _:
            return peer


def peer_from_plain(plain: str | Sequence[object]) -> Peer:
    """Reads what `peer_to_plain` returned; raises ValueError on anything else."""
    if isinstance(plain, str):
        return plain
    kind, number = plain
    if kind == _LOCAL:
        return LocalPart(number)
    if number is not None and not isinstance(number, int):
        raise ValueError(f"a rank is a whole number or None, got {number!r}")
    return RankRef(None if kind is None else MemberKind(kind), number)


_LOCAL = "local"
