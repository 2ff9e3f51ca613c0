"""Finds reward functions by reference: a built-in's name, `module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from paceline.core.errors import ConfigError
from paceline.core.reward_function import RewardFunction, inspect_function, one_line
from paceline.reward import builtin
from paceline.reward.builtin import mathematics

BUILTIN_NAMES = tuple(builtin.__all__)


def resolve(reference: str) -> RewardFunction:
    """Finds a reward function and checks that it can be called as one. Runs the module that it lives in.

    Args:
        reference: a built-in's name, `module:function` or `path/to/file.py:function`.

    Raises:
        ConfigError: there is no such built-in, file, module or function; the module fails to import; or the
            function cannot be called with a response and a ground truth.
    """
    target = getattr(builtin, reference) if reference in BUILTIN_NAMES else _import_target(reference)
    function = inspect_function(reference, target)
    if function.is_async:
        raise ConfigError(
            f"reward function {reference!r} is async: write a plain def (each reward process scores one item "
            "at a time), or run it as a reward service of its own (paceline.sdk.serve_reward)"
        )
    return function


def load(reference: str, arguments: Mapping[str, object]) -> RewardFunction:
    """Resolves a function, checks its configured arguments and imports what its first call would import.

    Raises:
        ConfigError: as `resolve`; an argument is unknown; or what the function needs is not installed.
    """
    function = resolve(reference)
    if reference in BUILTIN_NAMES:
        # A built-in accepts every field of an item; a configured argument that it does not name is a mistake.
        dataclasses.replace(function, takes_any=False).check_arguments(arguments)
    function.check_arguments(arguments)
    if reference == "math_verify":
        try:
            mathematics.load_library()
        except RuntimeError as error:
            raise ConfigError(f"reward function {reference!r}: {error}") from error
    return function


def _import_target(reference: str) -> object:
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(
            f"there is no built-in reward function {reference!r}: write {', '.join(BUILTIN_NAMES)}, or "
            "module:function, or path/to/file.py:function"
        )
    module = _load_file(reference, Path(place)) if place.endswith(".py") else _load_module(reference, place)
    target: object = module
    for part in name.split("."):
        if not hasattr(target, part):
            public = [
                key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
            ]
            known = f"its functions are {', '.join(sorted(public))}" if public else "it has no functions"
            raise ConfigError(f"reward function {reference!r}: {place} has no {name!r}; {known}")
        target = getattr(target, part)
    return target


def _load_module(reference: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            raise ConfigError(
                f"reward function {reference!r}: there is no module {error.name!r} on the Python path: start "
                "Paceline in the folder that holds it, install it, or write path/to/file.py:function"
            ) from error
        raise _import_failed(reference, place, error) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(reference, place, error) from error


def _load_file(reference: str, path: Path) -> ModuleType:
    path = path.expanduser()
    if not path.is_file():
        raise ConfigError(
            f"reward function {reference!r}: there is no file {path} (looked from {Path.cwd()})"
        )
    spec = importlib.util.spec_from_file_location(f"paceline_reward_file_{path.stem}", path.resolve())
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and typing look their module up there
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # so that the file may import its neighbours, as a script may
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _import_failed(reference, str(path), error) from error
    return module


def _import_failed(reference: str, place: str, error: BaseException) -> ConfigError:
    return ConfigError(
        one_line(f"reward function {reference!r}: importing {place} raised {type(error).__name__}: {error}")
    )
