"""Maps the exception tree to gRPC status codes, and rebuilds the same exception class at the caller.

An error travels as its status code, with its message in the details and its class and fields as JSON in the
trailing metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import grpc

from paceline.core import errors as core_errors
from paceline.core.errors import PacelineError, ProtocolError, RewardErrorKind
from paceline.core.members import Peer, peer_from_plain, peer_to_plain
from paceline.core.text import encodable, one_line, printable

ERROR_KEY = "paceline-error-bin"
# gRPC drops headers above 8 KiB, and with them the error's class.
MAX_MESSAGE_CHARS = 2000

# UNAVAILABLE is not in the table: it means that the peer cannot be reached.
STATUS_CODES: dict[type[PacelineError], grpc.StatusCode] = {
    core_errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    core_errors.DataError: grpc.StatusCode.INVALID_ARGUMENT,
    core_errors.ModelError: grpc.StatusCode.INVALID_ARGUMENT,
    core_errors.EnvironmentLackError: grpc.StatusCode.FAILED_PRECONDITION,
    core_errors.InvalidMessageError: grpc.StatusCode.INVALID_ARGUMENT,
    core_errors.IllegalTransitionError: grpc.StatusCode.FAILED_PRECONDITION,
    core_errors.VersionMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    ProtocolError: grpc.StatusCode.FAILED_PRECONDITION,
    core_errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    core_errors.PeerLostError: grpc.StatusCode.ABORTED,
    core_errors.FailedStartError: grpc.StatusCode.ABORTED,
    core_errors.BrokerError: grpc.StatusCode.ABORTED,
    core_errors.LostDataError: grpc.StatusCode.DATA_LOSS,
    core_errors.RewardError: grpc.StatusCode.UNKNOWN,
    core_errors.WeightSyncError: grpc.StatusCode.ABORTED,
    core_errors.CheckpointError: grpc.StatusCode.FAILED_PRECONDITION,
    core_errors.NumericsError: grpc.StatusCode.INTERNAL,
    core_errors.GuardError: grpc.StatusCode.ABORTED,
    PacelineError: grpc.StatusCode.INTERNAL,
}


def status_code(error: PacelineError) -> grpc.StatusCode:
    """Returns the code of the nearest class in the table."""
    return next(STATUS_CODES[kind] for kind in type(error).__mro__ if kind in STATUS_CODES)


def to_metadata(error: PacelineError) -> tuple[tuple[str, bytes], ...]:
    """Returns trailing metadata from which `from_metadata` rebuilds the error."""
    body = {"class": type(error).__name__, "message": clip(str(error)), "fields": _fields(error)}
    return ((ERROR_KEY, json.dumps(body).encode()),)


def from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> PacelineError | None:
    """Returns the error that a server sent, or None."""
    raw = next((value for key, value in metadata or () if key == ERROR_KEY), None)
    if raw is None:
        return None
    # Imported only by a process that is sent an error, because it loads numpy.
    from paceline.wire.json_object import read_json_object

    try:
        text = raw if isinstance(raw, str) else raw.decode()
        body: dict[str, Any] = read_json_object(text, "error of a peer")
        kind = _class_named(str(body["class"]))
        return _make(kind, clip(str(body["message"])), dict(body["fields"]))
    except (ValueError, KeyError, TypeError) as error:
        return ProtocolError(f"a peer sent an error that cannot be read: {one_line(str(error))}")


def clip(message: str) -> str:
    """Cuts a message to what fits into gRPC's headers, and escapes a terminal's control characters."""
    message = printable(encodable(message))
    return message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 4] + " ..."


def error_classes() -> Iterator[type[PacelineError]]:
    """Yields every class of the tree."""
    for value in vars(core_errors).values():
        if isinstance(value, type) and issubclass(value, PacelineError):
            yield value


def _class_named(name: str) -> type[PacelineError]:
    """Returns the class of that name; a newer peer's unknown class becomes the root."""
    return next((kind for kind in error_classes() if kind.__name__ == name), PacelineError)


def _fields(error: PacelineError) -> dict[str, object]:
    match error:
        case core_errors.InvalidMessageError():
            return {"reason": error.reason}
        case core_errors.DeadlineError():
            return {
                "phase": error.phase,
                "peer": peer_to_plain(error.peer),
                "seconds": error.seconds,
                "hint": clip(error.hint),
            }
        case core_errors.PeerLostError():
            return {"peer": peer_to_plain(error.peer)}
        case core_errors.RewardError():
            return {"kind": error.kind.value}
        case _:
            return {}


def _make(kind: type[PacelineError], message: str, fields: dict[str, object]) -> PacelineError:
    if issubclass(kind, core_errors.DeadlineError):
        return kind(
            phase=str(fields["phase"]),
            peer=_peer_of(fields),
            seconds=float(str(fields["seconds"])),
            hint=str(fields["hint"]),
        )
    if issubclass(kind, core_errors.PeerLostError):
        return kind(message, peer=_peer_of(fields))
    if issubclass(kind, core_errors.RewardError):
        return kind(message, kind=RewardErrorKind(fields["kind"]))
    return kind(message, **fields)


def _peer_of(fields: dict[str, object]) -> Peer:
    peer = fields["peer"]
    if not isinstance(peer, str | list):
        raise ValueError(f"a peer is a name or a rank, got {peer!r}")
    return peer_from_plain(peer)
