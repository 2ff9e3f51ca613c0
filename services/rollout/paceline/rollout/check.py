"""`python -m paceline.rollout.check FOLDER` compares vLLM's log-probs with those that the learner left there.

FOLDER holds the small model of the learner's self-test, `scored_rows.json`, and the images of its rows. The
engine runs in this process, on the CPU in float32.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import PacelineError, exit_code
from paceline.rollout.engines.vllm.scoring import largest_difference, read_rows
from paceline.service.observability.logs import setup_logging
from paceline.service.process import die_with_parent

_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 and prints a line of facts, or logs the first error and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m paceline.rollout.check", description=__doc__)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    die_with_parent()
    setup_logging("rollout-check", "INFO")
    rows = read_rows(given.folder)
    try:
        difference = largest_difference(given.folder, rows)
    except PacelineError as error:
        _log.error("fatal: %s", error)
        return exit_code(error)
    images = ", in prompts with images, too" if any(row.images for row in rows) else ""
    print(f"vLLM's log-probs are the learner's{images} (largest difference {difference:.1e})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
