"""Keeps functions out of the graphs of compiled layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

F = TypeVar("F", bound=Callable[..., object])


def opaque(function: F) -> F:
    """Makes compiled layers call a function as one operation; what it calls is not compiled either."""
    kept_out: F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return kept_out
