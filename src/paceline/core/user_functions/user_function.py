"""Finds a user's object or file by `module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from paceline.core.errors import ConfigError
from paceline.core.text import one_line


def find_function(reference: str, subject: str) -> object:
    """Finds the object that `reference` names.

    Args:
        reference: `module:function` or `path/to/file.py:function`, both parts not empty; a path is relative
            to the working directory.
        subject: kind of object, for errors: "reward function", "policy loss".

    Raises:
        ConfigError: there is no such file, module or function, or the module fails to import.
    """
    place, _, name = reference.rpartition(":")
    label = f"{subject} {reference!r}"
    module = _load_file(label, Path(place)) if place.endswith(".py") else _load_module(label, place)
    target: object = module
    for part in name.split("."):
        if not hasattr(target, part):
            public = [
                key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
            ]
            known = f"its functions are {', '.join(sorted(public))}" if public else "it has no functions"
            raise ConfigError(f"{label}: {place} has no {name!r}; {known}")
        target = getattr(target, part)
    return target


def source_file(reference: str) -> Path | None:
    """Returns the file that defines what `reference` names, without importing it; None if there is none."""
    place, _, _ = reference.rpartition(":")
    if place.endswith(".py"):
        candidates = [Path(place).expanduser()]
    else:
        bases = [Path(folder).joinpath(*place.split(".")) for folder in sys.path]
        candidates = [
            file for base in bases for file in (base / "__init__.py", base.with_name(f"{base.name}.py"))
        ]
    return next((file.resolve() for file in candidates if file.is_file()), None)


def _load_module(label: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{label}: there is no module {error.name!r} on the Python path: start Paceline in the "
                "folder that holds it, install it, or write path/to/file.py:function"
            ) from error
        raise _import_failed(label, place, error) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(label, place, error) from error


def _load_file(label: str, path: Path) -> ModuleType:
    path = path.expanduser()
    if not path.is_file():
        raise ConfigError(f"{label}: there is no file {path} (looked from {Path.cwd()})")
    spec = importlib.util.spec_from_file_location(f"paceline_user_file_{path.stem}", path.resolve())
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
        raise _import_failed(label, str(path), error) from error
    return module


def _import_failed(label: str, place: str, error: BaseException) -> ConfigError:
    return ConfigError(one_line(f"{label}: importing {place} raised {type(error).__name__}: {error}"))
