"""The element types that weights may have on the wire, and their sizes."""

from __future__ import annotations

from typing import Final

from paceline.core.errors import WeightSyncError

ITEM_SIZES: Final[dict[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element, by the name that torch uses after `torch.`"""


def item_size(dtype: str) -> int:
    """Bytes of one element; raises WeightSyncError for a type that cannot travel."""
    try:
        return ITEM_SIZES[dtype]
    except KeyError:
        raise WeightSyncError(
            f"weights of type {dtype!r} cannot be sent; allowed: {', '.join(ITEM_SIZES)}"
        ) from None
