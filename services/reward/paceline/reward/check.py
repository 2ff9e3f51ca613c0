"""`python -m paceline.reward.check NAME ...` checks scorers in a separate process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.config.load import load
from paceline.config.reward import RewardConfig
from paceline.config.run import RunConfig
from paceline.config.training.teacher import TeacherConfig
from paceline.config.validation import naming_set
from paceline.data.prompts import load_tokenizer
from paceline.reward.functions import registry
from paceline.reward.remote.scorer import RemoteScorer
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.reward.teacher.policy_tokens import policy_tokens
from paceline.reward.teacher.teacher import Teacher
from paceline.service.identity.credentials import REWARD_TOKEN, Credentials
from paceline.service.member.check import ServiceChecks, run_check
from paceline.storage.models import local_model


def _scorers(path: str) -> str:
    """Checks that functions can be called and services support the configuration; runs users' modules.

    Services that cannot be reached, or refuse this environment's token, pass: they may come up later.
    """
    config = load(RunConfig, Path(path))
    for name, reward in config.rewards.items():
        with naming_set(name):
            load_functions(reward)
            asyncio.run(_check_services(config, reward))
    if config.algorithm.teacher is not None:
        asyncio.run(_check_teacher(config, config.algorithm.teacher))
    functions = sum(len(reward.functions) for reward in config.rewards.values())
    services = sum(len(reward.services) for reward in config.rewards.values())
    return f"{functions} functions and {services} services"


def load_functions(reward: RewardConfig) -> None:
    """Loads the functions of a reward, which runs users' modules; raises what `registry.load` raises."""
    for function in reward.functions:
        registry.load(function.name, function.kwargs, group=function.group)


async def _check_services(config: RunConfig, reward: RewardConfig) -> None:
    settings = ScorerSettings(
        config=reward,
        credentials=Credentials.from_env(REWARD_TOKEN),
        max_message_bytes=config.service.max_message_mib * 2**20,
    )
    checks = [remote.check() for remote in RemoteScorer.configured(settings)]
    await asyncio.gather(*checks)


async def _check_teacher(config: RunConfig, teacher: TeacherConfig) -> None:
    """Compares the teacher with the policy, if the teacher answers."""
    model = local_model(config.model, "reward")
    asked = Teacher(teacher, policy_tokens(load_tokenizer(model.tokenizer_path or model.path), config))
    try:
        await asked.start()
    finally:
        await asked.close()


CHECKS: ServiceChecks = {"scorers": _scorers}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check that the command line names; returns the exit code."""
    return run_check("reward", CHECKS, arguments)


if __name__ == "__main__":
    sys.exit(main())
