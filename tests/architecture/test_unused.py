"""What is written is used: every configuration key is read, and nothing is used by tests alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

from pydantic import BaseModel

from paceline.config.run import RunConfig
from paceline.config.tuning import RmRunConfig, SftRunConfig
from paceline.core.guard import Action
from support import source


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, field name) of every leaf."""
    for name, field in model.model_fields.items():
        sections = [kind for kind in _types(field.annotation) if issubclass(kind, BaseModel)]
        if not sections:
            yield f"{prefix}{name}", name
        for section in sections:
            yield from _keys(section, f"{prefix}{name}.")


def _types(annotation: object) -> Iterator[type]:
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _types(argument)


def _read_names() -> set[str]:
    """Attributes that some module reads, options that algorithms take by name, and the guard's actions."""
    names = {action.value for action in Action}
    for name, path in source.modules().items():
        for node in ast.walk(source.tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.arg) and name.startswith("paceline.algorithms."):
                names.add(node.arg)
    return names


def test_every_configuration_key_is_read() -> None:
    keys = dict([*_keys(RunConfig), *_keys(SftRunConfig), *_keys(RmRunConfig)])
    assert len(keys) > 100, "the keys were not found"
    read = _read_names()
    assert sorted(key for key, name in keys.items() if name not in read) == []


def test_nothing_is_used_by_tests_alone() -> None:
    """pyproject.toml names what others call by name: gRPC, pydantic, vLLM, torch."""
    command = [sys.executable, "-m", "vulture"]
    result = subprocess.run(
        command, cwd=source.ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.stdout + result.stderr == ""
