"""`python -m paceline.learner.check NAME ...` checks in a separate process what the learner will do.

A fault that this finds ends the run before the learner's ranks load a model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.config.training.policy_losses import CustomLoss
from paceline.learner.model.self_test import check_models
from paceline.learner.train.algorithm import try_algorithm
from paceline.service.member.check import ServiceChecks, run_check


def _algorithm(path: str) -> str:
    """Calls the user's own algorithm, estimator and policy loss, named by the configuration at `path`."""
    config = load(RunConfig, Path(path))
    try_algorithm(config)
    own = [config.actor.policy_loss.path] if isinstance(config.actor.policy_loss, CustomLoss) else []
    own += [config.algorithm.name] if config.algorithm.is_own else []
    return f"{', '.join(own)}, called on a few short sequences"


def _self_test(path: str, kept: str) -> str:
    """Tests the run's models; leaves the policy's small model and its log-probs in a folder."""
    return "; ".join(map(str, check_models(load(RunConfig, Path(path)), keep=Path(kept))))


CHECKS: ServiceChecks = {"algorithm": _algorithm, "self-test": _self_test}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check that the command line names; returns the exit code."""
    return run_check("learner", CHECKS, arguments)


if __name__ == "__main__":
    sys.exit(main())
