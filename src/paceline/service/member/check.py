"""Runs the checks of a service in a separate process before the services start.

Most checks of `paceline.checks` run in the command itself. Those that import torch, an engine or a user's
module run as `python -m paceline.SERVICE.check NAME WORD...`: each service exports its own as `CHECKS`.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence

from paceline.core.errors import PacelineError, exit_code
from paceline.service.observability.logs import setup_logging
from paceline.service.process import die_with_parent

_log = logging.getLogger(__name__)

ServiceChecks = Mapping[str, Callable[..., str]]
"""Checks by name; each takes the remaining arguments and returns a line of facts or raises PacelineError."""


def run_check(service: str, checks: ServiceChecks, arguments: Sequence[str] | None = None) -> int:
    """Runs the check that the command line names; prints its line and returns 0.

    Logs a PacelineError and returns its exit code.
    """
    parser = argparse.ArgumentParser(prog=f"python -m paceline.{service}.check")
    parser.add_argument("name", choices=checks)
    parser.add_argument("words", nargs="*")
    given = parser.parse_args(arguments)
    die_with_parent()
    setup_logging(f"{service}-check", "WARNING")
    try:
        print(checks[given.name](*given.words))
    except PacelineError as error:
        _log.error("fatal: %s", error)
        return exit_code(error)
    return 0
