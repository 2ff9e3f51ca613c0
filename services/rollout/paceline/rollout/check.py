"""`python -m paceline.rollout.check ENGINE FOLDER` compares an engine's log-probs with those of the learner.

FOLDER holds the small model of the learner's self-test, `scored_rows.json`, and the images of its rows. The
engine runs in this process, on the CPU in float32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.engines.registry import engine_facts
from paceline.rollout.engines.loading import largest_difference
from paceline.rollout.engines.scored_rows import read_rows
from paceline.service.member.check import run_check


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 and prints a line of facts, or logs the first error and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m paceline.rollout.check", description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    return run_check("rollout", lambda: _check(given.engine, given.folder))


def _check(engine: str, folder: Path) -> None:
    rows = read_rows(folder)
    difference = largest_difference(engine, folder, rows)
    images = ", in prompts with images, too" if any(row.images for row in rows) else ""
    title = engine_facts(engine).title
    print(f"{title}'s log-probs are the learner's{images} (largest difference {difference:.1e})")


if __name__ == "__main__":
    sys.exit(main())
