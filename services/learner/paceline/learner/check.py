"""`python -m paceline.learner.check CONFIG` checks what the learner will do, in a process of its own.

It calls a user's own algorithm, estimator and policy loss: finding them runs the user's module, which neither
the launcher nor the controller may import. With `--self-test` it tests the model instead. A run should end
for such faults before the learner's ranks have loaded a model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.learner.model.self_test import check_models
from paceline.learner.train.algorithm import try_algorithm
from paceline.service.member.check import run_check


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 and prints a line of facts, or logs the first error and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m paceline.learner.check", description=__doc__)
    parser.add_argument("--self-test", action="store_true", help="test the model, not the algorithm")
    parser.add_argument("--keep", type=Path, help="folder for the self-test's small model and its log-probs")
    parser.add_argument("config", type=Path, help="resolved configuration of the run (YAML)")
    given = parser.parse_args(arguments)
    return run_check("learner", lambda: _check(given))


def _check(given: argparse.Namespace) -> None:
    config = load(RunConfig, given.config)
    if given.self_test:
        print("; ".join(map(str, check_models(config, keep=given.keep))))
    else:
        try_algorithm(config)


if __name__ == "__main__":
    sys.exit(main())
