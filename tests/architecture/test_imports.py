"""No module reaches itself through its imports, not even through one inside a function."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

from support import source


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
