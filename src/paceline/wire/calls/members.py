"""Converts kinds and states of members to the fields of registrations and heartbeats, and back."""

from __future__ import annotations

from paceline.core.members import (
    GpuUsage,
    LearnerState,
    MemberKind,
    MemberState,
    RewardState,
    RolloutState,
    Usage,
)
from paceline.rpc.v1 import common_pb2, controller_pb2
from paceline.wire.fields import reject
from paceline.wire.records import from_proto, to_proto

_KIND_NUMBERS = {
    MemberKind.ROLLOUT: common_pb2.MEMBER_KIND_ROLLOUT,
    MemberKind.LEARNER: common_pb2.MEMBER_KIND_LEARNER,
    MemberKind.REWARD: common_pb2.MEMBER_KIND_REWARD,
}
_KINDS = {number: kind for kind, number in _KIND_NUMBERS.items()}
_STATES: dict[MemberKind, type[RolloutState] | type[LearnerState] | type[RewardState]] = {
    MemberKind.ROLLOUT: RolloutState,
    MemberKind.LEARNER: LearnerState,
    MemberKind.REWARD: RewardState,
}


def member_kind_to_proto(kind: MemberKind) -> common_pb2.MemberKind.ValueType:
    """Writes a kind as its number in the protocol."""
    return _KIND_NUMBERS[kind]


def member_kind_from_proto(number: common_pb2.MemberKind.ValueType) -> MemberKind:
    """Reads the kind of a member.

    Raises:
        InvalidMessageError: the kind is unspecified or unknown to this version.
    """
    kind = _KINDS.get(number)
    if kind is None:
        names = ", ".join(sorted(known.value for known in MemberKind))
        reject("RegisterRequest", "incomplete_registration", f"kind {number} is none of {names}")
    return kind


def member_state_from_word(kind: MemberKind, word: str) -> MemberState:
    """Reads the state that a member of `kind` reports.

    Raises:
        InvalidMessageError: `word` is not a state of this kind.
    """
    try:
        return _STATES[kind](word)
    except ValueError:
        known = ", ".join(state.value for state in _STATES[kind])
        reject(
            "HeartbeatRequest",
            "unknown_state",
            f"a {kind.value} member has no state {word[:40]!r}, only {known}",
        )


def usage_to_proto(usage: Usage) -> controller_pb2.Usage:
    """Encodes the resources that a process uses on its machine."""
    gpus = [to_proto(gpu, controller_pb2.GpuUsage) for gpu in usage.gpus]
    return to_proto(usage, controller_pb2.Usage, gpus=gpus)


def usage_from_proto(message: controller_pb2.Usage) -> Usage:
    """Decodes the resources that a process uses on its machine."""
    return from_proto(message, Usage, gpus=tuple(from_proto(gpu, GpuUsage) for gpu in message.gpus))
