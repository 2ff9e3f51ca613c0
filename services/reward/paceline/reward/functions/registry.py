"""Finds reward functions by reference: a built-in's name, `module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from paceline.core.errors import ConfigError
from paceline.core.user_functions.reward_function import (
    RewardFunction,
    inspect_function,
    inspect_group_function,
)
from paceline.core.user_functions.user_function import find_function
from paceline.reward import builtin
from paceline.reward.builtin import mathematics

BUILTIN_NAMES = tuple(builtin.__all__)


def resolve(reference: str, *, group: bool = False) -> RewardFunction:
    """Finds a reward function and checks that it can be called as one. Imports its module.

    Args:
        reference: a built-in's name, `module:function` or `path/to/file.py:function`.
        group: whether the function scores the samples of a prompt together.

    Raises:
        ConfigError: there is no such built-in, file, module or function; the module fails to import; or the
            function cannot be called with a response and a ground truth, or with a list of items.
    """
    if group and reference in BUILTIN_NAMES:
        raise ConfigError(f"the built-in {reference!r} scores single responses: remove group: true")
    target = getattr(builtin, reference) if reference in BUILTIN_NAMES else _import_target(reference)
    function = (inspect_group_function if group else inspect_function)(reference, target)
    if function.is_async:
        raise ConfigError(
            f"reward function {reference!r} is async: write a plain def (each reward process scores one item "
            "at a time), or run it as a separate reward service (paceline.sdk.serve_reward)"
        )
    return function


def load(reference: str, arguments: Mapping[str, object], *, group: bool = False) -> RewardFunction:
    """Resolves a function, checks its configured arguments and imports what its first call would import.

    Raises:
        ConfigError: as in `resolve`; an argument is unknown; or what the function needs is not installed.
    """
    function = resolve(reference, group=group)
    if reference in BUILTIN_NAMES:
        # A built-in accepts every field of an item; a configured argument that it does not name is a mistake.
        dataclasses.replace(function, takes_any=False).check_arguments(arguments)
    function.check_arguments(arguments)
    missing = sorted(function.required - arguments.keys()) if group else []
    if missing:
        raise ConfigError(f"reward function {reference!r} needs {', '.join(missing)}: name them under kwargs")
    if reference == "math_verify":
        try:
            mathematics.load_library()
        except RuntimeError as error:
            raise ConfigError(f"reward function {reference!r}: {error}") from error
    return function


def _import_target(reference: str) -> object:
    place, _, name = reference.rpartition(":")
    if reference.endswith(".py"):
        raise ConfigError(f"{reference!r} names a file, but no function in it: write {reference}:FUNCTION")
    if not place or not name:
        raise ConfigError(
            f"there is no built-in reward function {reference!r}: write {', '.join(BUILTIN_NAMES)}, or "
            "module:function, or path/to/file.py:function"
        )
    return find_function(reference, "reward function")
