"""The states of a rollout server, and the one function that moves between them.

    JOINING --EngineReady--> STALE --ReceiveBegan--> SYNCING --Committed--> SERVING
                               ^                     |  ^                      |
                               +----ReceiveFailed----+  +-----ReceiveBegan-----+
    SYNCING, SERVING --Forgotten--> STALE
    any but LEFT --DrainBegan--> DRAINING --Left--> LEFT

SERVING is entered by `Committed` alone, `Committed` is legal in SYNCING alone, and there only for the version whose push has
been received completely: tokens are never drawn from weights that did not arrive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.core.errors import IllegalTransitionError, VersionMismatchError
from paceline.core.members import RECEIVABLE_STATES, RolloutState
from paceline.core.policy import PolicyTag


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """A state with the weights that go with it.

    `received` is the version whose push is complete but not committed; `policy` is what tokens are drawn from.
    """

    state: RolloutState = RolloutState.JOINING
    received: int | None = None
    policy: PolicyTag | None = None


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine is up; its weights mean nothing yet."""


@dataclass(frozen=True, slots=True)
class ReceiveBegan:
    """A push has begun: parameters are about to be overwritten."""


@dataclass(frozen=True, slots=True)
class ReceiveEnded:
    """Every rank holds all of `version`."""

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
    """The controller registered this server anew: it may have missed a version."""


@dataclass(frozen=True, slots=True)
class DrainBegan:
    """No more work is taken."""


@dataclass(frozen=True, slots=True)
class Left:
    """Nothing is under way any more."""


Event = EngineReady | ReceiveBegan | ReceiveEnded | ReceiveFailed | Committed | Forgotten | DrainBegan | Left


def advance(standing: Standing, event: Event) -> Standing:
    """The standing after `event`.

    Raises:
        IllegalTransitionError: the state does not have this move; names state and event.
        VersionMismatchError: a commit of a version that was not received.
    """
    state = standing.state
    match event:
        case EngineReady() if state is RolloutState.JOINING:
            return Standing(state=RolloutState.STALE)
        case ReceiveBegan() if state in RECEIVABLE_STATES:
            return Standing(state=RolloutState.SYNCING)
        case ReceiveEnded(version) if state is RolloutState.SYNCING:
            return replace(standing, received=version)
        case ReceiveFailed() if state is RolloutState.SYNCING:
            return Standing(state=RolloutState.STALE)
        case Committed(policy) if state is RolloutState.SERVING and policy == standing.policy:
            return standing  # the answer to the first commit was lost
        case Committed(policy) if state is RolloutState.SYNCING:
            if standing.received != policy.version:
                held = "no complete push" if standing.received is None else f"version {standing.received}"
                raise VersionMismatchError(
                    f"cannot commit {policy}: this server has received {held}; push version {policy.version} first"
                )
            return Standing(state=RolloutState.SERVING, policy=policy)
        case Forgotten() if state in (RolloutState.SYNCING, RolloutState.SERVING):
            return Standing(state=RolloutState.STALE)
        case DrainBegan() if state is not RolloutState.LEFT:
            return replace(standing, state=RolloutState.DRAINING)
        case Left() if state is RolloutState.DRAINING:
            return replace(standing, state=RolloutState.LEFT)
        case _:
            raise IllegalTransitionError(
                f"a rollout server that is {state.value} has no move for {type(event).__name__}"
            )
