"""Finds the engine that `rollout.name` in the configuration names.

A new engine is a module like `vllm` in this folder, a folder of `paceline.rollout.engines` and a line in
`ENGINES`.
"""

from __future__ import annotations

from typing import Final

from paceline.core.errors import ConfigError
from paceline.engines.facts import EngineFacts
from paceline.engines.sglang import SGLANG
from paceline.engines.vllm import VLLM

ENGINES: Final[dict[str, EngineFacts]] = {
    "vllm": VLLM,
    "sglang": SGLANG,
}
"""The facts of each engine, by `rollout.name`"""


def engine_facts(name: str) -> EngineFacts:
    """Returns the facts about an engine.

    Raises:
        ConfigError: there is no engine of this name.
    """
    if name not in ENGINES:
        raise ConfigError(
            f"rollout.name={name!r}: there is no such engine; the engines are {', '.join(sorted(ENGINES))}. "
            "docs/where-to-change-what.md says how to add one"
        )
    return ENGINES[name]
