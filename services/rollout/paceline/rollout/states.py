"""The states of a rollout server, and the one function that moves between them.

    JOINING --EngineReady--> STALE --ReceiveBegan--> SYNCING --Committed--> SERVING
                               ^                     |  ^                      |
                               +----ReceiveFailed----+  +-----ReceiveBegan-----+
    SYNCING, SERVING --Forgotten--> STALE
    STALE, SYNCING, SERVING --Slept--> ASLEEP --Woken(weights)--> STALE; no commit before Woken(kv_cache)
    every state --Drained--> DRAINING, for good

Only `Committed` leads to SERVING. It is legal only in SYNCING, with a KV cache, and for the version that was
received completely: no token is ever drawn from weights that did not arrive.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from paceline.core.errors import IllegalTransitionError, VersionMismatchError
from paceline.core.members import EnginePart, RolloutState
from paceline.core.policy import PolicyTag


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutStatus:
    """A state and its weights.

    `received` is the version that was received completely but is not committed; `policy` is the policy that
    tokens are drawn from. `asleep` are the parts of the engine whose memory is freed.
    """

    state: RolloutState = RolloutState.JOINING
    received: int | None = None
    policy: PolicyTag | None = None
    asleep: frozenset[EnginePart] = frozenset()


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine is up; its weights do not belong to any version yet."""


@dataclass(frozen=True, slots=True)
class ReceiveBegan:
    """A push has begun: parameters are about to be overwritten."""


@dataclass(frozen=True, slots=True)
class ReceiveEnded:
    """Every rank has received all of `version`."""

    version: int


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    """A push broke off: parameters are a mixture of versions."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The controller made the received version the policy."""

    policy: PolicyTag


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The controller has registered this server a second time: the server may have missed a version."""


@dataclass(frozen=True, slots=True)
class Slept:
    """The engine gives up the memory of weights and KV cache."""


@dataclass(frozen=True, slots=True)
class Woken:
    """The engine has the memory of a part again; weights first."""

    part: EnginePart


@dataclass(frozen=True, slots=True)
class Drained:
    """The server was told to finish its work and leave."""


Event = (
    Drained
    | EngineReady
    | ReceiveBegan
    | ReceiveEnded
    | ReceiveFailed
    | Committed
    | Forgotten
    | Slept
    | Woken
)

_AT_WORK: Final = (RolloutState.STALE, RolloutState.SYNCING, RolloutState.SERVING)

_LEGAL_IN: Final[dict[type[Event], Collection[RolloutState]]] = {
    EngineReady: (RolloutState.JOINING,),
    ReceiveBegan: _AT_WORK,
    ReceiveEnded: (RolloutState.SYNCING,),
    ReceiveFailed: (RolloutState.SYNCING,),
    Committed: (RolloutState.SYNCING,),
    Forgotten: (RolloutState.SYNCING, RolloutState.SERVING),
    Slept: (*_AT_WORK, RolloutState.ASLEEP),
    Woken: (*_AT_WORK, RolloutState.ASLEEP),
    Drained: tuple(RolloutState),
}


def advance(standing: RolloutStatus, event: Event) -> RolloutStatus:
    """Returns the standing after `event`; a repeated commit, sleep or wake returns the same object.

    Raises:
        IllegalTransitionError: the move is not allowed in this state, or while the engine sleeps.
        VersionMismatchError: a commit of a version that was not received.
    """
    is_serving = standing.state is RolloutState.SERVING
    if is_serving and isinstance(event, Committed) and event.policy == standing.policy:
        return standing  # the answer to the first commit was lost
    if standing.state not in _LEGAL_IN[type(event)]:
        raise IllegalTransitionError(
            f"a rollout server that is {standing.state.value} has no move for {type(event).__name__}"
        )
    match event:
        case ReceiveBegan():
            return RolloutStatus(state=RolloutState.SYNCING, asleep=standing.asleep)
        case ReceiveEnded(version):
            return replace(standing, received=version)
        case Committed(policy):
            _check_received(standing, policy)
            _check_awake(standing)
            return RolloutStatus(state=RolloutState.SERVING, policy=policy)
        case Drained():
            return RolloutStatus(state=RolloutState.DRAINING, policy=standing.policy)
        case Slept():
            return standing if standing.state is RolloutState.ASLEEP else _ASLEEP
        case Woken(part):
            return _woken(standing, part)
        case EngineReady() | ReceiveFailed() | Forgotten():
            return RolloutStatus(state=RolloutState.STALE, asleep=standing.asleep)


_ASLEEP: Final = RolloutStatus(state=RolloutState.ASLEEP, asleep=frozenset(EnginePart))


def _woken(standing: RolloutStatus, part: EnginePart) -> RolloutStatus:
    if part not in standing.asleep:
        return standing
    if part is EnginePart.WEIGHTS:
        return RolloutStatus(state=RolloutState.STALE, asleep=standing.asleep - {part})
    if EnginePart.WEIGHTS in standing.asleep:
        raise IllegalTransitionError("a rollout server that is asleep wakes its weights first")
    return replace(standing, asleep=frozenset())


def _check_awake(standing: RolloutStatus) -> None:
    if standing.asleep:
        parts = ", ".join(sorted(part.value for part in standing.asleep))
        raise IllegalTransitionError(
            f"nothing can be committed while {parts} of the engine is asleep; wake it"
        )


def _check_received(standing: RolloutStatus, policy: PolicyTag) -> None:
    if standing.received != policy.version:
        received = "no complete push" if standing.received is None else f"version {standing.received}"
        raise VersionMismatchError(
            f"cannot commit {policy}: this server has received {received}; "
            f"push version {policy.version} first"
        )
