"""Checks that a rollout server has the learner's model, before a weight group is formed."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.errors import WeightSyncError
from paceline.weights.geometry.layout import RankLayout, tensor_shapes
from paceline.weights.geometry.sharding import Sharding


def misfit(learners: Sequence[RankLayout], server: Sequence[RankLayout], wire_dtype: str) -> str | None:
    """Says why a server's ranks cannot take the learner's tensors; None if they can.

    Without this check, every member would find the mismatch while joining, and all would seem at fault.

    Args:
        server: one layout per rank of the server; a rank of the general path takes every tensor.
        wire_dtype: element type on the wire, which the server's parameters must have.
    """
    for rank, layout in enumerate(server):
        if layout.dtype != wire_dtype:
            return f"its rank {rank} keeps {layout.dtype} parameters, model.dtype is {wire_dtype}"
    learned = Sharding.of(learners).shapes
    try:
        needed = tensor_shapes(server)
    except WeightSyncError as error:
        return str(error)
    for name, shape in needed.items():
        if name not in learned:
            return f"it needs {name} of shape {shape}, which the learner does not hold"
        if learned[name] != shape:
            return f"{name}: it needs shape {shape}, the learner holds {learned[name]}"
    if any(layout.full_tensors for layout in server):
        return None
    unused = [name for name in learned if name not in needed]
    if not unused:
        return None
    return (
        f"{unused[0]} of shape {learned[unused[0]]}: the learner holds it, the server does not take it "
        f"({len(unused)} such tensors)"
    )
