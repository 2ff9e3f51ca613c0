"""Starts the engine that `rollout.name` in the configuration names.

A new engine is a folder beside this module and a line in `ENGINES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from operator import attrgetter
from typing import Final

from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError
from paceline.rollout.engines.base import Engine

ENGINES: Final[dict[str, str]] = {
    "vllm": "paceline.rollout.engines.vllm.engine:VllmEngine.start",
}
"""`rollout.name` -> "module:function", an `async def start(config: RunConfig) -> Engine`; imported on use"""


async def start_engine(config: RunConfig) -> Engine:
    """Starts the engine that the configuration names.

    Raises:
        ConfigError: there is no engine of this name, or it cannot be run with this configuration.
        EnvironmentLackError: the machine lacks what the engine needs.
        ModelError: the engine does not start with this model.
    """
    check_engine_name(config)
    module, _, path = ENGINES[config.rollout.name].partition(":")
    start: Callable[[RunConfig], Awaitable[Engine]] = attrgetter(path)(importlib.import_module(module))
    return await start(config)


def check_engine_name(config: RunConfig) -> None:
    """Raises ConfigError if `rollout.name` is no engine; imports none."""
    if config.rollout.name not in ENGINES:
        raise ConfigError(
            f"rollout.name={config.rollout.name!r}: there is no such engine; the engines are "
            f"{', '.join(sorted(ENGINES))}. docs/add-an-engine.md says how to add one"
        )
