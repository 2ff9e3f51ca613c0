"""`python -m paceline.rollout.check FOLDER` compares vLLM's log-probs with those that the learner left there.

FOLDER holds the small model of the learner's self-test, `scored_rows.json`, and the images of its rows. The
engine runs in this process, on the CPU in float32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.rollout.engines.vllm.scoring import largest_difference, read_rows
from paceline.service.member.check import run_check


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 and prints a line of facts, or logs the first error and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m paceline.rollout.check", description=__doc__)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    return run_check("rollout", lambda: _check(given.folder))


def _check(folder: Path) -> None:
    rows = read_rows(folder)
    difference = largest_difference(folder, rows)
    images = ", in prompts with images, too" if any(row.images for row in rows) else ""
    print(f"vLLM's log-probs are the learner's{images} (largest difference {difference:.1e})")


if __name__ == "__main__":
    sys.exit(main())
