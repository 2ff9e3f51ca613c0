"""What weights travel over: NCCL between GPUs, gloo where there is a rank without a GPU or two on one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from paceline.weights.geometry.layout import RankLayout


def choose_backend(
    configured: Literal["auto", "gloo", "nccl"], layouts: Sequence[RankLayout]
) -> Literal["gloo", "nccl"]:
    """The backend of a group of ranks.

    NCCL refuses two ranks on one GPU. GPUs are compared by their own ids: an index names different GPUs on
    different machines and in different containers.

    Args:
        configured: weights.backend.
        layouts: of all ranks.
    """
    if configured != "auto":
        return configured
    gpus = [layout.place.gpu for layout in layouts]
    return "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"
