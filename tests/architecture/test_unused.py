"""What is written is used: every configuration key is read, and nothing is used by tests alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

from pydantic import BaseModel

from paceline.config.run import RunConfig, SftRunConfig
from support import source

ALLOWED = source.ROOT / "tests" / "architecture" / "allowed_unused.py"


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


def test_every_configuration_key_is_read() -> None:
    read = {
        node.attr
        for name, path in source.modules().items()
        for node in ast.walk(source.tree(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    keys = dict([*_keys(RunConfig), *_keys(SftRunConfig)])
    assert len(keys) > 100, "the keys were not found"
    assert sorted(key for key, name in keys.items() if name not in read) == []


def test_nothing_is_used_by_tests_alone() -> None:
    """The allow-list names what others call: gRPC, pydantic, vLLM, pytest."""
    command = [
        sys.executable,
        "-m",
        "vulture",
        "src",
        "services",
        str(ALLOWED),
        "--exclude",
        "*_pb2*",
        "--min-confidence",
        "60",
    ]
    result = subprocess.run(
        command, cwd=source.ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.stdout == ""
    assert result.stderr == ""
