"""`python -m paceline.reward.check CONFIG`: whether functions can be called, and services do what is asked.

Services that cannot be reached, or refuse this environment's token, are passed: they may come up later.
Finding a function runs the user's module. This happens in a process of its own, not in the launcher, before
the services start.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.reward.functions import registry
from paceline.reward.remote.scorer import RemoteScorer
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.service.identity.credentials import REWARD_TOKEN, Credentials
from paceline.service.member.check import run_check


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or logs the first error and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m paceline.reward.check", description=__doc__)
    parser.add_argument("config", type=Path, help="resolved configuration of the run (YAML)")
    path: Path = parser.parse_args(arguments).config
    return run_check("reward", lambda: _check(path))


def _check(path: Path) -> None:
    config = load(RunConfig, path)
    for function in config.reward.functions:
        registry.load(function.name, function.kwargs, group=function.group)
    asyncio.run(_check_services(config))


async def _check_services(config: RunConfig) -> None:
    settings = ScorerSettings(
        config=config.reward,
        credentials=Credentials.from_env(REWARD_TOKEN),
        max_message_bytes=config.service.max_message_mib * 2**20,
    )
    checks = [remote.check() for remote in RemoteScorer.services(settings)]
    await asyncio.gather(*checks)


if __name__ == "__main__":
    sys.exit(main())
