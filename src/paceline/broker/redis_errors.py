"""Translates the redis client's errors into Paceline's; messages never contain the password."""

from __future__ import annotations

import re

from redis import exceptions

from paceline.broker.address import redact
from paceline.core.errors import BrokerError, DeadlineError, PacelineError


def translate(error: Exception, *, url: str, command: str, timeout_s: float) -> PacelineError:
    """The error to raise instead of `error`."""
    where = redact(url)
    if isinstance(error, (TimeoutError, exceptions.TimeoutError)):
        return DeadlineError(
            phase=command,
            peer=f"broker {where}",
            seconds=timeout_s,
            hint="the server is overloaded, frozen or unreachable",
        )
    if isinstance(error, exceptions.AuthenticationError) or _says(error, "NOAUTH", "WRONGPASS"):
        return BrokerError(f"{command}: broker {where} refused the password: correct it in broker.url")
    if _says(error, "OOM"):
        return BrokerError(
            f"{command}: broker {where} is out of memory and took nothing: raise its maxmemory, or lower "
            "broker.max_stream_length or data.train_batch_size"
        )
    if isinstance(error, exceptions.BusyLoadingError):
        return BrokerError(f"{command}: broker {where} is still loading its data: wait for it to be ready")
    if isinstance(error, (exceptions.ConnectionError, OSError)):
        return BrokerError(f"{command}: broker {where} cannot be reached ({error}): is the server running?")
    return BrokerError(f"{command}: broker {where} refused it: {error}")


def _says(error: Exception, *words: str) -> bool:
    """Whether the text contains one of the server's error codes; a script's errors have it at the end."""
    return any(re.search(rf"\b{word}\b", str(error)) for word in words)


def is_missing(error: Exception) -> bool:
    """Whether a command failed because the stream or group does not exist or was deleted during the wait."""
    return isinstance(error, exceptions.ResponseError) and (
        _says(error, "NOGROUP", "UNBLOCKED")
        or "no such key" in str(error)
        or "requires the key to exist" in str(error)
    )
