"""How a run ended, according to the controller or to the process that failed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from paceline.core.errors import ConfigError, PacelineError, PeerLostError
from paceline.core.run_record.run_events import EndEvent
from paceline.launch.processes.spawn import ManagedProcess


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOutcome:
    """Says how a launch ended, and why.

    Attributes:
        began: whether the run's members were started, so that its folder has records.
    """

    ok: bool
    message: str
    exit_code: int
    began: bool = True


def failed(message: str) -> LaunchOutcome:
    """Returns the outcome of a run that failed."""
    return LaunchOutcome(ok=False, message=message, exit_code=1)


def outcome_of_run(following: asyncio.Task[EndEvent]) -> LaunchOutcome:
    """Returns the outcome that the controller reported, or its loss; `following` must be done."""
    try:
        end = following.result()
    except PeerLostError as error:
        return failed(str(error))
    return LaunchOutcome(ok=end.ok, message=end.message, exit_code=0 if end.ok else 1)


def error_at_start(process: ManagedProcess) -> PacelineError:
    """Returns the error of a process that ended while starting; only its own sentence if it refused its
    input."""
    error = process.last_error()
    if process.exited.result() == 2 and error:
        return ConfigError(error)
    return PeerLostError(process.describe_end("ended while starting"), peer=process.name)
