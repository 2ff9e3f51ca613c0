"""Defines the tool of this example."""

from __future__ import annotations

import ast
import operator

_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculator(expression: str) -> int:
    """Works out a sum, difference or product of whole numbers, for example 17+35."""
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only whole numbers with +, - and * can be worked out")
