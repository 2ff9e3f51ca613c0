"""Runs services' checks, each in its own process: they import torch, an engine or a user's module."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from paceline.checks.preflight_check import PreflightCheck
from paceline.config.load import dump_yaml
from paceline.config.run import RunConfig
from paceline.config.training.policy_losses import CustomLoss
from paceline.core.errors import ConfigError, ModelError
from paceline.engines.registry import engine_facts
from paceline.models.facts import family_in
from paceline.storage.models import local_folder, local_model

# The self-test of Qwen3-30B-A3B takes 23 s on two cores.
_CHECK_S = 300.0


def _algorithm_line(config: RunConfig) -> str:
    """Names the algorithm; has the learner call a user's own algorithm, estimator and policy loss."""
    loss, algorithm = config.actor.policy_loss, config.algorithm
    line = f"{algorithm.name}, {loss.type}"
    if algorithm.is_own or isinstance(loss, CustomLoss):
        line = _check_of("learner", "algorithm", config, "the algorithm", ConfigError)
    correction = config.rollout_correction.method
    return line if correction == "none" else f"{line}, rollout correction: {correction}"


def _dataflow_line(config: RunConfig) -> str:
    """Has the controller try a step of a user's dataflow; says what the step did."""
    if config.trainer.dataflow is None:
        return "built-in"
    return _check_of("controller", "dataflow", config, "trainer.dataflow", ConfigError)


def self_test(config: RunConfig, kept: Path) -> str:
    """Runs the learner's self-test and returns its line; its small model and log-probs remain in a folder.

    Raises:
        ModelError: the model is refused or its numbers are wrong; the message gives the reason.
    """
    # Needs only config.json, which is on this machine if the controller is.
    local = with_local_models(config)
    return _check_of("learner", "self-test", local, "the model", ModelError, str(kept))


def engine_log_probs(config: RunConfig, kept: Path) -> str:
    """Compares the engine's log-probs with those that the self-test left in a folder, on its small model.

    Raises:
        ConfigError: there is no engine of this name.
        ModelError: they differ, or there was no self-test.
    """
    name = config.rollout.name
    facts = engine_facts(name)
    if not facts.score:
        return f"not compared, because the engine of rollout.name={name} cannot score given rows"
    if config.rollout.python:
        return (
            "not compared, because rollout.python is another environment; guard.mismatch_kl compares them in "
            "the first step of the run"
        )
    if not facts.has_cpu_build:
        return (
            f"not compared, because that needs {facts.title}'s build for CPUs; guard.mismatch_kl compares "
            "them in the first step of the run"
        )
    if family_in(kept).has_states:
        return (
            f"not compared: {facts.title}'s build for CPUs computes layers with a state only in bfloat16; "
            "guard.mismatch_kl compares them in the first step of the run"
        )
    if not any(kept.iterdir()):
        raise ModelError("the self-test left no log-probs to compare with; correct its fault first")
    command = [sys.executable, "-m", "paceline.rollout.check", "log-probs", name, str(kept)]
    return _printed_by(command, "the engine's log-probs", ModelError)


def with_local_models(config: RunConfig) -> RunConfig:
    """Returns the configuration with the controller's folders of policy and frozen networks (no weights)."""
    place = partial(local_folder, model=config.model, weights=False)
    model, algorithm = local_model(config.model, "controller"), config.algorithm.with_places(place)
    return config.model_copy(update={"model": model, "algorithm": algorithm})


def _check_of(
    service: str,
    name: str,
    config: RunConfig,
    subject: str,
    fault: type[ConfigError] | type[ModelError],
    *words: str,
) -> str:
    """Returns the line that a service's check prints about a configuration."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(dump_yaml(config))
        file.flush()
        command = [sys.executable, "-m", f"paceline.{service}.check", name, file.name, *words]
        return _printed_by(command, subject, fault)


def _printed_by(command: Sequence[str], subject: str, fault: type[ConfigError] | type[ModelError]) -> str:
    """Returns the last line that a check prints; an engine's kernels may print lines before it."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=_CHECK_S, check=False)
    except subprocess.TimeoutExpired:
        raise fault(
            f"the check of {subject} gave no answer within {_CHECK_S:.0f} s: the machine is too busy, or the "
            f"check hangs; look at `{' '.join(['python', *command[1:-1], '...'])}`"
        ) from None
    if process.returncode:
        said = process.stderr.rpartition("fatal: ")[2].strip()
        raise fault(
            said or f"the check of {subject} ended with exit code {process.returncode} and said nothing"
        )
    return process.stdout.strip().rpartition("\n")[2]


CHECKS = (
    PreflightCheck(name="algorithm", run=_algorithm_line),
    PreflightCheck(name="dataflow", run=_dataflow_line),
)
