"""A check of a run before it starts: each module of this package exports its own as `CHECKS`."""

from __future__ import annotations

import enum
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from paceline.config.run import RunConfig
from paceline.core.errors import GIVEN_ERRORS, EnvironmentLackError
from paceline.service.addresses import split

_REACH_S = 3.0
_PAUSE_S = 0.2
_Result = TypeVar("_Result")


class CheckNeed(enum.Enum):
    """What a check needs besides the configuration and the files that it names.

    NOTHING: nothing more.
    SELF_TEST: time for the learner's self-test, and a folder for its results.
    HERE: execution on the machine where the run will start.
    ELSEWHERE: a run that will start on another machine.
    ENGINE: like HERE, with time for the engine's test and the folder with the results of the self-test.
    """

    NOTHING = 0
    SELF_TEST = 1
    HERE = 2
    ELSEWHERE = 3
    ENGINE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightCheck:
    """A part of `paceline check`.

    Attributes:
        run: returns a line of facts on a configuration; raises a PacelineError that says what is wrong. With
            SELF_TEST and ENGINE it takes the folder as `kept`.
        wait: what takes several seconds, in words; printed before the check.
    """

    name: str
    run: Callable[..., str]
    needs: CheckNeed = CheckNeed.NOTHING
    wait: str = ""


def for_each_engine(config: RunConfig, check: Callable[[RunConfig], _Result]) -> list[_Result]:
    """Calls a check with the configuration of each engine's servers; returns the results.

    An error names the engine if it is one of rollout.other_engines.

    Raises:
        PacelineError: one of GIVEN_ERRORS; the first fault.
    """

    def result(of_engine: RunConfig) -> _Result:
        name = of_engine.rollout.name
        try:
            return check(of_engine)
        except GIVEN_ERRORS as error:
            if name == config.rollout.name:
                raise
            raise type(error)(f"rollout.other_engines.{name}: {error}") from error

    return [result(of_engine) for of_engine in config.by_engine]


def reach(key: str, address: str, what: str, remedy: str, *, patience_s: float = 0.0) -> None:
    """Raises EnvironmentLackError if nobody has listened at an address for `patience_s`."""
    until = time.monotonic() + patience_s
    while True:
        try:
            return socket.create_connection(split(address), timeout=_REACH_S).close()
        except OSError as error:
            if time.monotonic() < until:
                time.sleep(_PAUSE_S)
                continue
            reason = error.strerror or str(error) or type(error).__name__
            raise EnvironmentLackError(
                f"nobody answers at {key}={address}, {what} ({reason}); {remedy} before the run, or correct "
                "the address"
            ) from error
