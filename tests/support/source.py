"""The repository's own source as data for the tests of this folder: modules, their imports, their names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("controller", "rollout", "learner", "reward")
ROOTS = (ROOT / "src", *(ROOT / "services" / name for name in SERVICES))
GENERATED = ("rpc", "v1")


@cache
def modules() -> dict[str, Path]:
    """Every module of the program by its dotted name, generated code left out."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for root in ROOTS
        for path in sorted(root.rglob("*.py"))
        if path.relative_to(root).parts[1:3] != GENERATED
    }


@cache
def tree(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(name: str) -> Iterator[tuple[str, int]]:
    """What a module imports of ours, and in which line.

    Imports inside functions count, and so do those that only types need.
    """
    known = modules()
    for node in ast.walk(tree(known[name])):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            wanted = [
                f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in known else node.module
                for alias in node.names
            ]
        else:
            continue
        yield from ((target, node.lineno) for target in dict.fromkeys(wanted) if target in known)


def bound(path: Path) -> set[str]:
    """The names that a file binds outside its functions and classes."""
    names: set[str] = set()
    nodes: list[ast.AST] = list(tree(path).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        else:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            nodes.extend(ast.iter_child_nodes(node))
    return names
