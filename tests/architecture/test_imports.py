"""No module reaches itself through its imports, and what is imported exists, outside the program too."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter

from support import source

OUTSIDE = ("benchmarks", "tools", "examples")


def test_no_import_cycles() -> None:
    graph = {name: {target for target, _ in source.imports(name)} - {name} for name in source.modules()}
    assert len(graph) > 150, "the modules were not found"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError("import cycle: " + " <- ".join(error.args[1])) from None


def test_lazy_imports_are_seen() -> None:
    """Some modules import inside a function; a graph without such edges would prove little."""
    lazy = [
        (name, target)
        for name in source.modules()
        for target, line in source.imports(name)
        if source.modules()[name].read_text().splitlines()[line - 1].startswith(" ")
    ]
    assert lazy


def test_benchmarks_tools_and_examples_import_what_exists() -> None:
    """None of them is run by all tests, and most need GPUs."""
    files = [path for top in OUTSIDE for path in sorted((source.ROOT / top).rglob("*.py"))]
    missing, seen = [], 0
    for path in files:
        known = source.modules() | {sibling.stem: sibling for sibling in path.parent.glob("*.py")}
        for node in ast.walk(source.tree(path)):
            if not isinstance(node, ast.ImportFrom) or node.module not in known:
                continue
            names = source.bound(known[node.module])
            for alias in node.names:
                seen += 1
                if alias.name not in names and f"{node.module}.{alias.name}" not in known:
                    missing.append(
                        f"{path.relative_to(source.ROOT)}:{node.lineno}: {node.module}.{alias.name}"
                    )
    assert seen > 300, "the imports were not found"
    assert not missing, "\n".join(missing)
