"""Executes a notebook's cells in this process, one after the other, as a kernel does."""

from __future__ import annotations

import ast
import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class CellOutput:
    """What a cell printed, and the value of its last expression."""

    text: str
    value: Any


def run_notebook(path: Path, parameters: dict[str, Any]) -> list[CellOutput]:
    """The outputs of all code cells. These variables are set after the cell with the tag `parameters`."""
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for number, cell in enumerate(code_cells(path), start=1):
        outputs.append(_run("".join(cell["source"]), names, f"cell {number}"))
        if "parameters" in cell["metadata"].get("tags", ()):
            names |= parameters
    return outputs


def code_cells(path: Path) -> list[dict[str, Any]]:
    """The notebook's code cells as they are stored, with their outputs."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def _run(source: str, names: dict[str, Any], title: str) -> CellOutput:
    tree, value, text = ast.parse(source), None, io.StringIO()
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(text):
        exec(compile(tree, title, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), title, "eval"), names)
    return CellOutput(text=text.getvalue(), value=value)
