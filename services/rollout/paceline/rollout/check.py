"""`python -m paceline.rollout.check NAME ...` checks in a separate process what an engine computes."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.engines.registry import engine_facts
from paceline.rollout.engines.loading import largest_difference
from paceline.rollout.engines.scored_rows import read_rows
from paceline.service.member.check import ServiceChecks, run_check


def _log_probs(engine: str, kept: str) -> str:
    """Compares the engine's log-probs with those of the learner, on the CPU in float32.

    The folder holds the small model of the learner's self-test, `scored_rows.json`, and its rows' images.
    """
    folder = Path(kept)
    rows = read_rows(folder)
    difference = largest_difference(engine, folder, rows)
    images = ", in prompts with images, too" if any(row.images for row in rows) else ""
    title = engine_facts(engine).title
    return f"{title}'s log-probs are the learner's{images} (largest difference {difference:.1e})"


CHECKS: ServiceChecks = {"log-probs": _log_probs}


if __name__ == "__main__":
    sys.exit(run_check("rollout", CHECKS))
