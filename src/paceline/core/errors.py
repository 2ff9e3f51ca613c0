"""The exception tree. Every class is also the standard-library type that it refines.

PacelineError
├── ConfigError(ValueError)          what the user wrote cannot be run
├── DataError(ValueError)            a data file, column or prompt is unusable
├── ModelError(ValueError)           a model folder or tokenizer is unusable
├── EnvironmentLackError(RuntimeError)  the machine lacks something: Redis, an engine, a port, a GPU
├── ProtocolError(RuntimeError)      a message, or the order of messages, violates the protocol
│   ├── InvalidMessageError(ValueError)   a message failed validation at a trust boundary
│   ├── IllegalTransitionError       a state machine was asked for an illegal transition
│   └── VersionMismatchError         a token, member or digest belongs to another policy version
├── DeadlineError(TimeoutError)      a wait ran out; names the phase, the peer and the seconds
├── PeerLostError(ConnectionError)   a member of the fleet died or cannot be reached
├── BrokerError(ConnectionError)     the message broker refused or lost a command
├── LostDataError(LookupError)       the broker no longer holds what the run stored there: collect it again
├── RewardError(RuntimeError)        a reward could not be computed; carries a RewardErrorKind
├── WeightSyncError(RuntimeError)    a weight push failed, or its digests differ
├── CheckpointError(RuntimeError)    a checkpoint is missing, incomplete or does not fit
├── NumericsError(ArithmeticError)   a loss, gradient or mask makes no sense
└── GuardError(RuntimeError)         a guard rule ended the run
"""

from __future__ import annotations

import enum

from paceline.core.members import Peer


class PacelineError(Exception):
    """Root of all errors that Paceline raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        # Without __init__, which takes fields by keyword.
        return _empty, (type(self),), {**self.__dict__, "args": self.args}


class ConfigError(PacelineError, ValueError):
    """The configuration cannot be run; the message names the key and what to write instead."""


class DataError(PacelineError, ValueError):
    """A data file, a column or a prompt is unusable."""


class ModelError(PacelineError, ValueError):
    """A model folder or tokenizer is missing or unusable."""


class EnvironmentLackError(PacelineError, RuntimeError):
    """The machine lacks something that the run needs."""


GIVEN_ERRORS = (ConfigError, DataError, ModelError, EnvironmentLackError)
"""Errors in the run's inputs; a restart without a change fails in the same way."""


EXIT_FAILED, EXIT_GIVEN, EXIT_FINAL, EXIT_AGAIN = 1, 2, 3, 4
"""Exit codes of a process that ends with an error; see `exit_code`."""


def exit_code(error: BaseException) -> int:
    """Returns a process's exit code, which says whether starting the process again can help.

    2: inputs or the machine are unusable (GIVEN_ERRORS). 3: the run itself cannot continue, because of a
    guard rule, impossible numbers, or a checkpoint that does not fit. 4: the start failed, but the next one
    may succeed. 1: any other error, which a restart may fix.
    """
    if isinstance(error, BaseExceptionGroup):
        return min(exit_code(part) for part in error.exceptions)
    if isinstance(error, GIVEN_ERRORS):
        return EXIT_GIVEN
    if isinstance(error, FailedStartError):
        return EXIT_AGAIN
    return EXIT_FINAL if isinstance(error, (CheckpointError, GuardError, NumericsError)) else EXIT_FAILED


class ProtocolError(PacelineError, RuntimeError):
    """A message, or the order of messages, breaks the protocol."""


class InvalidMessageError(ProtocolError, ValueError):
    """A message failed validation at a trust boundary; `reason` is a short stable word for the journal."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class IllegalTransitionError(ProtocolError):
    """A state machine was asked for an illegal transition; the message names both states."""


class VersionMismatchError(ProtocolError):
    """A token, member or digest belongs to another policy version than the one required."""


class DeadlineError(PacelineError, TimeoutError):
    """A wait ran out of time.

    Args:
        phase: the phase in progress, for example "COLLECT".
        peer: the peer waited for, for example "rollout-0", "redis" or a rank of a weight group.
        seconds: how long the wait was allowed to take.
        hint: what to look at or change.
    """

    def __init__(self, *, phase: str, peer: Peer, seconds: float, hint: str = "") -> None:
        tail = f"; {hint}" if hint else ""
        super().__init__(f"{phase}: no answer from {peer} within {seconds:g} s{tail}")
        self.phase, self.peer, self.seconds, self.hint = phase, peer, seconds, hint


class PeerLostError(PacelineError, ConnectionError):
    """A member of the fleet died or cannot be reached; `peer` is its member id or rank."""

    def __init__(self, message: str, *, peer: Peer) -> None:
        super().__init__(message)
        self.peer = peer


class FailedStartError(PeerLostError):
    """The start failed because something died or changed during it; the next one may succeed."""


class BrokerError(PacelineError, ConnectionError):
    """The message broker refused or lost a command."""


class LostDataError(PacelineError, LookupError):
    """Blobs of a batch are missing, or are not the ones that were scored; nothing was trained on them.

    The step can be collected again.
    """


class RewardErrorKind(enum.Enum):
    """Why a reward could not be computed; the value is the word used on the wire and in the journal."""

    RAISED = "raised"
    TIMEOUT = "timeout"
    NOT_FINITE = "not_finite"
    WRONG_TYPE = "wrong_type"
    OUT_OF_RANGE = "out_of_range"
    WRONG_COUNT = "wrong_count"
    UNAVAILABLE = "unavailable"
    CRASHED = "crashed"
    LOST = "lost"


class RewardError(PacelineError, RuntimeError):
    """A reward could not be computed."""

    def __init__(self, message: str, *, kind: RewardErrorKind) -> None:
        super().__init__(message)
        self.kind = kind


class WeightSyncError(PacelineError, RuntimeError):
    """A weight push failed, or the digests of its two sides differ."""


class CheckpointError(PacelineError, RuntimeError):
    """A checkpoint is missing, incomplete or does not fit the run."""


class NumericsError(PacelineError, ArithmeticError):
    """A loss, gradient, mask or statistic has an impossible value."""


class GuardError(PacelineError, RuntimeError):
    """A guard rule ended the run; the message says which number crossed which bound."""


def _empty(kind: type[PacelineError]) -> PacelineError:
    """Makes an error on the other side of a process boundary, which then gets its arguments and fields."""
    return kind.__new__(kind)
