"""The experts that an engine has chosen for a sample's tokens (`actor.router_replay`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

ChoiceArray = npt.NDArray[Any]
"""(T, L, K) uint8 or uint16: by token and layer with experts, the experts that the token was sent to.

A token whose first two experts are the same has no choices: no engine computed it, or it did not say."""

_DIGEST_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertChoices:
    """The choices of all tokens of a trajectory, prompt and response.

    Attributes:
        num_layers: L.
        num_chosen: K.
        item_bytes: bytes per choice: 1 for at most 256 experts, else 2.
        array: (T, L, K); None where only the digest is known, as in files of trajectories.
    """

    num_layers: int
    num_chosen: int
    item_bytes: int
    digest: str
    array: ChoiceArray | None = None

    @classmethod
    def of(cls, array: ChoiceArray) -> ExpertChoices:
        """Returns the record of an array."""
        _, num_layers, num_chosen = array.shape
        return cls(
            num_layers=num_layers,
            num_chosen=num_chosen,
            item_bytes=array.itemsize,
            digest=choices_digest(array.tobytes()),
            array=array,
        )

    def to_plain(self) -> dict[str, object]:
        """Returns all but the array as plain data."""
        return {name: getattr(self, name) for name in ("num_layers", "num_chosen", "item_bytes", "digest")}

    @classmethod
    def from_plain(cls, text: str | None) -> ExpertChoices | None:
        """Reads `to_plain` from JSON; None for None."""
        return None if text is None else cls(**json.loads(text))


def choices_digest(data: bytes) -> str:
    """Returns the digest of an array's bytes: blake2b, 16 bytes, hexadecimal."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def joined_choices(parts: Sequence[ChoiceArray | None], lengths: Sequence[int]) -> ChoiceArray | None:
    """Joins choices of neighbouring tokens; tokens behind a part's end have none. None if no part has any.

    Args:
        parts: by part, the choices of at most `lengths` tokens, or None.
    """
    like = next((part for part in parts if part is not None), None)
    if like is None:
        return None
    joined = np.zeros((sum(lengths), *like.shape[1:]), like.dtype)
    start = 0
    for part, length in zip(parts, lengths, strict=True):
        if part is not None:
            joined[start : start + len(part)] = part[:length]
        start += length
    return joined
