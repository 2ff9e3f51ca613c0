"""Checks and starts the engine that `rollout.name` in the configuration names.

A new engine is a folder beside this module and a line in `ENGINES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from operator import attrgetter
from typing import Any, Final, NamedTuple

from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError
from paceline.rollout.engines.base import Engine


class EngineEntry(NamedTuple):
    """What an engine's folder offers, each as "module:function"; imported on use.

    Attributes:
        start: an `async def start(config: RunConfig) -> Engine`.
        check: a `def check(config: RunConfig) -> None` that raises ConfigError for what the engine cannot be
            run with; it must not need the engine itself, since `paceline check` runs where there is none.
        begin: a `def begin() -> None` for what must be done while the process has no threads; "": nothing.
    """

    start: str
    check: str
    begin: str = ""


ENGINES: Final[dict[str, EngineEntry]] = {
    "vllm": EngineEntry(
        start="paceline.rollout.engines.vllm.engine:VllmEngine.start",
        check="paceline.rollout.engines.vllm.start.refusals:check",
        begin="paceline.rollout.engines.vllm.start.prefork:begin",
    ),
}
"""By `rollout.name`"""


def begin() -> None:
    """What a rollout server does first of all; it does not know its run's configuration yet."""
    for entry in ENGINES.values():
        if entry.begin:
            _load(entry.begin)()


async def start_engine(config: RunConfig) -> Engine:
    """Starts the engine that the configuration names.

    Raises:
        ConfigError: there is no engine of this name, or it cannot be run with this configuration.
        EnvironmentLackError: the machine lacks what the engine needs.
        ModelError: the engine does not start with this model.
    """
    check_engine(config)
    start: Callable[[RunConfig], Awaitable[Engine]] = _load(ENGINES[config.rollout.name].start)
    return await start(config)


def check_engine(config: RunConfig) -> None:
    """Raises ConfigError if `rollout.name` is no engine or the engine refuses the configuration."""
    if config.rollout.name not in ENGINES:
        raise ConfigError(
            f"rollout.name={config.rollout.name!r}: there is no such engine; the engines are "
            f"{', '.join(sorted(ENGINES))}. docs/add-an-engine.md says how to add one"
        )
    check: Callable[[RunConfig], None] = _load(ENGINES[config.rollout.name].check)
    check(config)


def _load(target: str) -> Any:
    module, _, path = target.partition(":")
    return attrgetter(path)(importlib.import_module(module))
