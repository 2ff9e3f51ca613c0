"""One word for one idea: the words that docs/glossary.md bans are in no name of the program or its tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from support import source

GLOSSARY = source.ROOT / "docs" / "glossary.md"


def _banned(heading: str) -> frozenset[str]:
    """The words in the first column of the table under a heading of the glossary."""
    section = GLOSSARY.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    return frozenset(word for cell in rows for word in re.findall(r"`([A-Za-z_]+)`", cell))


BANNED_PARTS = _banned("Words that are gone")
BANNED_NAMES = _banned("No names")
# An MLP's gate projection, SAPO's soft gate, FSDP's reshard: words of the field, for other ideas than ours.
FOREIGN = frozenset({"_GATE_UP", "gate_proj", "gate_up_proj", "soft_gate", "gate", "_reshard"})
FILES = [
    *source.modules().values(),
    *sorted(
        path
        for top in ("tests", "benchmarks", "tools", "examples")
        for path in (source.ROOT / top).rglob("*.py")
    ),
]


def _names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every name that a file binds and that lives longer than a comprehension."""
    nodes = list(ast.walk(tree))
    short_lived = {
        id(node)
        for comprehension in nodes
        if isinstance(comprehension, ast.comprehension)
        for node in ast.walk(comprehension.target)
    }
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in short_lived:
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, 0


@cache
def _is_banned(name: str) -> bool:
    return name in BANNED_NAMES or (name not in FOREIGN and bool(_parts(name) & BANNED_PARTS))


def _parts(name: str) -> set[str]:
    """snake_case and CamelCase, in lower-case words."""
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_no_name_has_a_banned_word() -> None:
    assert len(FILES) > 1000, "the files were not found"
    banned = [
        f"{path.relative_to(source.ROOT)}:{line} {name}"
        for path in FILES
        for name, line in [(path.stem, 0), *_names(source.tree(path))]
        if _is_banned(name)
    ]
    assert banned == []


def test_the_glossary_bans_something() -> None:
    assert {"warden", "keeper", "sandbox"} <= BANNED_PARTS
    assert {"one", "found", "held", "mine", "whole"} <= BANNED_NAMES


def test_a_public_class_name_is_unique() -> None:
    """A name that two modules use for two things has to be looked up by its import wherever it is read."""
    homes: dict[str, list[str]] = {}
    for module, path in source.modules().items():
        for node in source.tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}
