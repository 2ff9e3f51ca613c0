"""Reads the redis client's errors: which are temporary, what others mean. Never shows the password."""

from __future__ import annotations

import re
import ssl
from dataclasses import replace
from typing import Final

from redis import exceptions

from paceline.broker.address import redact
from paceline.broker.redis.outage import Trouble
from paceline.core.errors import BrokerError

_FULL: Final = Trouble(
    state="is full: it has used its maxmemory, takes no more messages, and nothing drains",
    remedy="raise its maxmemory (broker.max_memory_mib for the run's own server), or lower "
    "broker.max_stream_length or data.train_batch_size",
    may_move=False,
)
_BY_CODE: Final = {
    "OOM": _FULL,
    "LOADING": Trouble(state="is still loading its data", remedy="wait for it to be ready"),
    "READONLY": Trouble(
        state="is a replica, which takes no messages",
        remedy="promote it, or point the address at the primary",
    ),
    "MASTERDOWN": Trouble(
        state="is a replica that has lost its primary", remedy="promote it, or start the primary again"
    ),
    "NOREPLICAS": Trouble(state="has too few replicas to write", remedy="start its replicas again"),
    "MISCONF": Trouble(
        state="cannot write its data to disk",
        remedy="make room on its disk (for the run's own server, the run directory's); see its log",
        needs_help=True,
    ),
    "BUSY": Trouble(state="is busy with a script", remedy="wait, or end the script with SCRIPT KILL"),
}
# For errors that have a class, the client removes the code from the text.
_CODE_OF_CLASS: Final = {
    exceptions.OutOfMemoryError: "OOM",
    exceptions.BusyLoadingError: "LOADING",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.MasterDownError: "MASTERDOWN",
}
_DISK_CAUSE: Final = re.compile(r"Errors writing to the AOF file: ([\w /]+?)(?: script:|[.,]|$)")
_REFUSED_PASSWORD: Final = (exceptions.AuthenticationError, exceptions.AuthenticationWrongNumberOfArgsError)


def trouble_of(error: Exception, *, timeout_s: float) -> Trouble | None:
    """Returns the temporary problem of the server that an error shows; None if waiting cannot help."""
    if isinstance(error, (TimeoutError, exceptions.TimeoutError)):
        return Trouble(
            state=f"has not answered for {timeout_s:g} s",
            remedy="it is frozen, overloaded or cut off: look at its process and its machine",
            silent_s=timeout_s,
        )
    code = _CODE_OF_CLASS.get(type(error)) or next((code for code in _BY_CODE if _says(error, code)), None)
    if code is not None:
        return _with_cause(_BY_CODE[code], str(error))
    if isinstance(error, (exceptions.ConnectionError, OSError)) and not _is_final(error):
        reason = redact(str(error)).rstrip(".")
        return Trouble(
            state=f"cannot be reached ({reason})", remedy="start the server again, or correct broker.url"
        )
    return None


def _with_cause(trouble: Trouble, text: str) -> Trouble:
    """Adds the server's own words about its disk, if any, such as that no space is left."""
    cause = _DISK_CAUSE.search(text)
    return replace(trouble, state=f"{trouble.state} ({cause[1]})") if cause else trouble


def refusal(error: Exception, *, server: str, command: str) -> BrokerError:
    """Returns the error to raise if waiting cannot help."""
    if isinstance(error, _REFUSED_PASSWORD) or _says(error, "NOAUTH") or _says(error, "WRONGPASS"):
        return BrokerError(f"{command}: broker {server} refused the password: correct it in broker.url")
    return BrokerError(f"{command}: broker {server} refused it: {error}")


def is_missing(error: Exception) -> bool:
    """Returns whether a command failed because the stream or group is missing or was deleted."""
    return isinstance(error, exceptions.ResponseError) and (
        _says(error, "NOGROUP")
        or _says(error, "UNBLOCKED")
        or "no such key" in str(error)
        or "requires the key to exist" in str(error)
    )


def _says(error: Exception, code: str) -> bool:
    """Returns whether the server gave this error code, directly or (after a colon) in a script."""
    return re.search(rf"(?:^|: -?){code} ", str(error)) is not None


def _is_final(error: Exception) -> bool:
    """Returns whether a connection fails permanently: because of the password or the server's certificate."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    return isinstance(error, _REFUSED_PASSWORD) or any(
        isinstance(cause, ssl.SSLCertVerificationError) for cause in causes
    )
