"""Checks what trains: the algorithm and the dataflow, each tried where it is the user's own."""

from __future__ import annotations

from paceline.checks.preflight_check import PreflightCheck
from paceline.checks.service_checks import check_algorithm, try_dataflow
from paceline.config.run import RunConfig
from paceline.config.training.policy_losses import CustomLoss


def _algorithm_line(config: RunConfig) -> str:
    loss, algorithm = config.actor.policy_loss, config.algorithm
    own = [loss.path] if isinstance(loss, CustomLoss) else []
    own += [algorithm.name] if algorithm.is_own else []
    if not own:
        return f"{algorithm.name}, {loss.type}"
    check_algorithm(config)
    return f"{', '.join(own)}, called on a few short sequences"


def _dataflow_line(config: RunConfig) -> str:
    return try_dataflow(config) if config.trainer.dataflow is not None else "built-in"


CHECKS = (
    PreflightCheck(name="algorithm", run=_algorithm_line),
    PreflightCheck(name="dataflow", run=_dataflow_line),
)
