"""Checks what scores the responses: functions, models, judges and services."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from paceline.checks.preflight_check import CheckNeed, PreflightCheck, reach
from paceline.config.run import RunConfig
from paceline.config.validation import naming_set, reward_key
from paceline.core.errors import DataError, ModelError
from paceline.core.user_functions.reward_function import check_extra_keys


def functions_line(config: RunConfig) -> str:
    """Loads the reward functions; says what they give to the first row's ground truth."""
    from paceline.reward.check import load_functions

    lines = []
    for name, reward in config.rewards.items():
        with naming_set(name):
            load_functions(reward)
            check_extra_keys(config.data.extra_keys)
            functions = ", ".join(function.name for function in reward.functions) or "none"
            lines += [f"{name}: {functions}" if name else functions, _example_reward(config, name)]
    return "\n      ".join(filter(None, lines))


def _example_reward(config: RunConfig, val_set: str) -> str:
    from paceline.checks.example import example_reward

    try:
        return example_reward(config, val_set)
    except DataError:
        return ""  # the part of the prompts says what is wrong with them


def models_line(config: RunConfig) -> str:
    """Checks the folders of the reward models and the prompts of the judges."""
    for number, model in enumerate(config.reward.models):
        if not (Path(model.path) / "config.json").is_file():
            raise ModelError(
                f"reward.models.{number}.path={model.path} is not a model folder (no config.json); correct it"
            )
        if model.prompt_file is not None:
            _check_question(model.prompt_file, model.pattern)
    return ", ".join(f"{model.name} in {model.path}" for model in config.reward.models) or "none"


def _check_question(prompt_file: str, pattern: str) -> None:
    """Checks that a judge's prompt file shows the response, and that its pattern has a group."""
    from paceline.reward.judge.question import GradePattern, JudgePrompt, read_prompt_file

    JudgePrompt(read_prompt_file(prompt_file))
    GradePattern(pattern, {})


def services_line(config: RunConfig) -> str:
    """Checks that remote scorers and a teacher listen, and checks the prompts of judges."""
    names = []
    for name, reward in config.rewards.items():
        with naming_set(name):
            for judge in reward.judges:
                _check_question(judge.prompt_file, judge.pattern)
        for number, service in enumerate(reward.services):
            key = f"{reward_key(name)}.services.{number}.address"
            reach(key, service.address, f"the reward service {service.name!r}", "start it")
            names.append(f"{service.name} at {service.address}")
    if (teacher := config.algorithm.teacher) is not None:
        place = urlsplit(teacher.address)
        port = place.port or (443 if place.scheme == "https" else 80)
        reach(
            "algorithm.teacher.address",
            f"{place.hostname}:{port}",
            f"the teacher {teacher.model!r}",
            "start it",
        )
        names.append(f"teacher {teacher.model} at {teacher.address}")
    return ", ".join(names) or "none"


CHECKS = (
    PreflightCheck(name="reward functions", run=functions_line),
    PreflightCheck(name="reward models", run=models_line, needs=CheckNeed.HERE),
    PreflightCheck(name="reward services", run=services_line, needs=CheckNeed.HERE),
)
