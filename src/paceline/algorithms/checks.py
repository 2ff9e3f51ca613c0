"""Checks shapes and ranges for the numeric functions."""

from __future__ import annotations

import math

from torch import Tensor

from paceline.core.errors import ConfigError, NumericsError


def require_same_shape(**tensors: Tensor | None) -> None:
    """Raises NumericsError unless all given tensors have one shape; broadcasting is nearly always a bug."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        listing = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise NumericsError(f"these tensors must have the same shape: {listing}; pad or slice them to one")


def require_rows(rows: int, **tensors: Tensor | None) -> None:
    """Raises NumericsError unless every given tensor is a vector of `rows` entries, one for each sequence."""
    for name, tensor in tensors.items():
        if tensor is not None and tuple(tensor.shape) != (rows,):
            raise NumericsError(
                f"{name} must have shape ({rows},), one entry for each sequence, not {tuple(tensor.shape)}"
            )


def require_positions(mask: Tensor) -> None:
    """Raises NumericsError unless the mask has shape (B, T) with T at least 1."""
    if mask.dim() != 2 or mask.shape[-1] == 0:
        raise NumericsError(f"mask must have shape (B, T) with T at least 1, not {tuple(mask.shape)}")


def require_range(
    name: str,
    value: float,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> None:
    """Raises ConfigError unless `value` is finite and lies in the range."""
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (("above", above), ("at least", at_least), ("at most", at_most))
        if bound is not None
    ]
    wrong = (
        not math.isfinite(value)
        or (above is not None and value <= above)
        or (at_least is not None and value < at_least)
        or (at_most is not None and value > at_most)
    )
    if wrong:
        raise ConfigError(f"{name} is {value:g}; it must be a finite number {' and '.join(bounds)}".rstrip())
