"""Runs the checks of a configuration before anything starts: all of them, or only the quick ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from paceline.checks import (
    broker_checks,
    data_checks,
    machine_checks,
    model_checks,
    reward_checks,
    rollout_checks,
    service_checks,
)
from paceline.checks.data_checks import check_data_files, first_prompt_is_text
from paceline.checks.machine_checks import require_packages
from paceline.checks.model_checks import has_chat_template, model_line, networks_line
from paceline.checks.preflight_check import CheckNeed, PreflightCheck
from paceline.config.run import RunConfig
from paceline.engines.registry import engine_facts
from paceline.models.facts import config_tree, family_in
from paceline.show.trackers.adapters import check_installed

CHECKS: Sequence[PreflightCheck] = (
    *model_checks.CHECKS,
    *data_checks.CHECKS,
    *machine_checks.CHECKS,
    *reward_checks.CHECKS,
    *rollout_checks.CHECKS,
    *broker_checks.CHECKS,
    *service_checks.CHECKS,
)
"""The checks of all modules; checks that need the machine come after those that need nothing."""


def quick_check(config: RunConfig, *, here: bool = True) -> None:
    """Runs the quick checks of `paceline check`, before `paceline train` creates anything.

    It loads a tokenizer only to compare those of frozen networks; the controller checks data and prompts.

    Args:
        here: whether the run's services start on this machine; if so, its GPUs and network are checked.

    Raises:
        PacelineError: one of GIVEN_ERRORS; the first fault.
    """
    if here:
        require_packages(config)
    rollout_checks.engine_line(config)
    check_data_files(config)
    model_line(config)
    check_installed(config.trainer.loggers)
    if here:
        networks_line(config)
        reward_checks.models_line(config)
        machine_checks.devices_line(config)
        reward_checks.services_line(config)
        rollout_checks.environment_line(config)


def notes(config: RunConfig) -> list[str]:
    """Returns notes on settings that may be unintended."""
    words = []
    if (
        config.data.prompt_format == "auto"
        and config.data.system_prompt is None
        and has_chat_template(config.model)
        and first_prompt_is_text(config)
    ):
        words.append(
            "the prompts are strings, which go to the model without its chat template; instruct models "
            "expect it: set data.prompt_format=chat, or data.prompt_format=text to silence this note"
        )
    actor = config.actor
    if actor.aggregation != "seq-mean-token-mean" == actor.policy_loss.aggregation:
        words.append(
            f"actor.loss_agg_mode={actor.aggregation} weights sequences by their lengths; the paper of "
            f"{actor.policy_loss.type} does not, and neither does verl with any loss_agg_mode; leave the key "
            "out for seq-mean-token-mean"
        )
    return words + _uncompared(config)


def _uncompared(config: RunConfig) -> list[str]:
    """Returns a note for each engine in which log-probs of the model's family were not compared."""
    folder = Path(config.model.path)
    kind, name = config_tree(folder).get("model_type"), family_in(folder).name or "this model"
    engines = [engine_facts(engine) for engine in config.rollout.engine_names]
    return [
        f"log-probs of {name} from {engine.title} were never compared with the learner's: watch "
        "rollout/mismatch_kl in the first steps"
        for engine in engines
        if kind and engine.compared is not None and kind not in engine.compared
    ]


def parts(*, here: bool, tests: Path | None) -> list[PreflightCheck]:
    """Returns the checks of `paceline check`, in order.

    Args:
        here: whether the run will start on this machine.
        tests: an empty folder for files that tests of the model pass to each other; None skips these tests.
    """
    if tests is None:
        return _with(CheckNeed.NOTHING) + _with(CheckNeed.HERE if here else CheckNeed.ELSEWHERE)
    first = [
        replace(check, run=partial(check.run, kept=tests)) if check.needs is CheckNeed.SELF_TEST else check
        for check in _with(CheckNeed.NOTHING, CheckNeed.SELF_TEST)
    ]
    if not here:
        return first + _with(CheckNeed.ELSEWHERE)
    last = [replace(check, run=partial(check.run, kept=tests)) for check in _with(CheckNeed.ENGINE)]
    return first + _with(CheckNeed.HERE) + last


def _with(*needs: CheckNeed) -> list[PreflightCheck]:
    return [check for check in CHECKS if check.needs in needs]
