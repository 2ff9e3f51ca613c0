"""`python -m paceline.reward.check CONFIG`: whether the configured reward functions can be called.

Finding a function runs the user's module. This happens in a process of its own, not in the launcher, before
the services start.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.core.errors import PacelineError, exit_code
from paceline.reward.functions import registry
from paceline.service.logs import setup_logging
from paceline.service.process import die_with_parent

_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or logs the first error and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m paceline.reward.check", description=__doc__)
    parser.add_argument("config", type=Path, help="resolved configuration of the run (YAML)")
    path: Path = parser.parse_args(arguments).config
    die_with_parent()
    setup_logging("reward-check", "INFO")
    try:
        for function in load(RunConfig, path).reward.functions:
            registry.load(function.name, function.kwargs)
    except PacelineError as error:
        _log.error("fatal: %s", error)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
