"""Loads and calls the functions that an engine's facts name: its begin, check, start and scores."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from paceline.config.run import RunConfig
from paceline.engines.registry import ENGINES, engine_facts
from paceline.rollout.engines.base import Engine
from paceline.rollout.engines.scored_rows import ScoredRow


def begin() -> None:
    """Calls the `begin` of all engines, because a server does not know its run's configuration yet."""
    for facts in ENGINES.values():
        if facts.begin:
            _load(facts.begin)()


async def start_engine(config: RunConfig) -> Engine:
    """Starts the engine that the configuration names.

    Raises:
        ConfigError: there is no engine of this name, or it cannot be run with this configuration.
        EnvironmentLackError: the machine lacks what the engine needs.
        ModelError: the engine does not start with this model, or weights cannot be pushed into it.
        DeadlineError, PeerLostError: the engine has died or hangs.
    """
    check_engine(config)
    start: Callable[[RunConfig], Awaitable[Engine]] = _load(engine_facts(config.rollout.name).start)
    engine = await start(config)
    try:
        await engine.describe()  # an engine without pushes fails here, before the learner has loaded
    except BaseException:
        await engine.shutdown()
        raise
    return engine


def check_engine(config: RunConfig) -> None:
    """Raises ConfigError if `rollout.name` is no engine or the engine refuses the configuration."""
    check: Callable[[RunConfig], None] = _load(engine_facts(config.rollout.name).check)
    check(config)


def largest_difference(name: str, folder: Path, rows: Sequence[ScoredRow]) -> float:
    """Returns the largest difference between an engine's log-probs and the rows' own, in nats.

    Args:
        name: name of an engine that scores rows (`EngineFacts.score`).
        rows: at most 127 tokens each.

    Raises:
        ConfigError: there is no engine of this name.
        EnvironmentLackError: the engine's build for the CPU is not installed.
        ModelError: the engine does not run the model, or computes other log-probs.
    """
    score: Callable[[Path, Sequence[ScoredRow]], float] = _load(engine_facts(name).score)
    return score(folder, rows)


def _load(target: str) -> Any:
    module, _, path = target.partition(":")
    return attrgetter(path)(importlib.import_module(module))
