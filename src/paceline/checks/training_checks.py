"""Checks the algorithm and the dataflow; those that a user wrote are tried."""

from __future__ import annotations

from paceline.checks.preflight_check import PreflightCheck
from paceline.checks.service_checks import check_algorithm, try_dataflow
from paceline.config.run import RunConfig
from paceline.config.training.policy_losses import CustomLoss


def _algorithm_line(config: RunConfig) -> str:
    loss, algorithm = config.actor.policy_loss, config.algorithm
    is_own = algorithm.is_own or isinstance(loss, CustomLoss)
    line = check_algorithm(config) if is_own else f"{algorithm.name}, {loss.type}"
    correction = config.rollout_correction.method
    return line if correction == "none" else f"{line}, rollout correction: {correction}"


def _dataflow_line(config: RunConfig) -> str:
    return try_dataflow(config) if config.trainer.dataflow is not None else "built-in"


CHECKS = (
    PreflightCheck(name="algorithm", run=_algorithm_line),
    PreflightCheck(name="dataflow", run=_dataflow_line),
)
