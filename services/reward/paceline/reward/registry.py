"""From the name of a reward function to the function: built-ins, `module:function`, `path/to/file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from paceline.core.errors import ConfigError
from paceline.reward import builtin
from paceline.reward.builtin import mathematics
from paceline.reward.scoring import one_line

BUILTIN_NAMES = tuple(builtin.__all__)
_FORM = "write f(response: str, ground_truth: str, **extra) -> float"
_PREPARATIONS: dict[str, Callable[[], object]] = {"math_verify": mathematics.load_library}


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedFunction:
    """A reward function that was found and looked over.

    `named` are the extra fields that its signature names, `required` those of them without a default, and
    `takes_any` tells whether it takes others too (`**extra`). `prepare` does what would make the first call slow.
    """

    reference: str
    call: Callable[..., object]
    named: frozenset[str]
    required: frozenset[str]
    takes_any: bool
    prepare: Callable[[], object] | None = None


def resolve(reference: str) -> ResolvedFunction:
    """Finds a reward function and checks that it can be called as one. Runs the module that it lives in.

    Args:
        reference: a built-in's name, `module:function` or `path/to/file.py:function`.

    Raises:
        ConfigError: there is no such built-in, file, module or function; the module fails to import; or the
            function cannot be called with a response and a ground truth.
    """
    if reference in BUILTIN_NAMES:
        function: object = getattr(builtin, reference)
    else:
        function = _find(reference)
    named, required, takes_any = _check_signature(reference, function)
    assert callable(function)
    return ResolvedFunction(
        reference=reference,
        call=function,
        named=named,
        required=required,
        takes_any=takes_any,
        prepare=_PREPARATIONS.get(reference),
    )


def check_arguments(resolved: ResolvedFunction, arguments: Mapping[str, object]) -> None:
    """Refuses configured arguments that the function does not have.

    A built-in takes any field of an item, but a configured argument that it does not name is a slip of the pen.

    Raises:
        ConfigError: an argument is unknown.
    """
    if resolved.takes_any and resolved.reference not in BUILTIN_NAMES:
        return
    unknown = sorted(set(arguments) - resolved.named)
    if unknown:
        known = f"it has {', '.join(sorted(resolved.named))}" if resolved.named else "it has none"
        raise ConfigError(f"reward function {resolved.reference!r} has no argument {unknown[0]!r}; {known}")


def _find(reference: str) -> object:
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(
            f"there is no built-in reward function {reference!r}: write {', '.join(BUILTIN_NAMES)}, or "
            "module:function, or path/to/file.py:function"
        )
    module = _load_file(reference, Path(place)) if place.endswith(".py") else _load_module(reference, place)
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [
                key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
            ]
            known = f"its functions are {', '.join(sorted(public))}" if public else "it has no functions"
            raise ConfigError(f"reward function {reference!r}: {place} has no {name!r}; {known}")
        found = getattr(found, part)
    return found


def _load_module(reference: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            raise ConfigError(
                f"reward function {reference!r}: there is no module {error.name!r} on the Python path: start Paceline "
                "in the folder that holds it, install it, or write path/to/file.py:function"
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


def _check_signature(reference: str, function: object) -> tuple[frozenset[str], frozenset[str], bool]:
    """The extra fields that the function names, those that it must be given, and whether it takes others."""
    if not callable(function):
        raise ConfigError(
            f"reward function {reference!r} is {type(function).__name__}, not a function: {_FORM}"
        )
    if inspect.isclass(function):
        raise ConfigError(
            f"reward function {reference!r} is a class: name a function or an instance; {_FORM}"
        )
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise ConfigError(
            f"reward function {reference!r} is async: write a plain def (each worker process scores one item at a "
            "time), or run it as a reward service of its own"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C do not tell theirs
        return frozenset(), frozenset(), False
    parameters = list(signature.parameters.values())
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    takes_any_position = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    if len(positional) < 2 and not takes_any_position:
        raise ConfigError(
            f"reward function {reference!r} has the signature {signature}: it must take the response and the ground "
            f"truth by position; {_FORM}"
        )
    named = [one for one in positional[2:] if one.kind is not one.POSITIONAL_ONLY]
    named += [one for one in parameters if one.kind is one.KEYWORD_ONLY]
    required = frozenset(one.name for one in named if one.default is one.empty)
    stuck = [
        one.name for one in positional[2:] if one.kind is one.POSITIONAL_ONLY and one.default is one.empty
    ]
    if stuck:
        raise ConfigError(
            f"reward function {reference!r} has the signature {signature}: {', '.join(stuck)} can only be given by "
            f"position, and only the response and the ground truth are; {_FORM}"
        )
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    return frozenset(one.name for one in named), required, takes_any
