"""The entry point of a service's check, which runs in a process of its own before the services start."""

from __future__ import annotations

import logging
from collections.abc import Callable

from paceline.core.errors import PacelineError, exit_code
from paceline.service.observability.logs import setup_logging
from paceline.service.process import die_with_parent

_log = logging.getLogger(__name__)


def run_check(name: str, check: Callable[[], None], *, level: str = "INFO") -> int:
    """Runs a check, which prints what it found; returns 0, or logs its error and returns the exit code.

    Args:
        name: what its lines in the log are of.
        check: raises a PacelineError for what is wrong.
        level: the least level that is logged.
    """
    die_with_parent()
    setup_logging(f"{name}-check", level)
    try:
        check()
    except PacelineError as error:
        _log.error("fatal: %s", error)
        return exit_code(error)
    return 0
