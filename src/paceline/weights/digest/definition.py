"""Defines digests of weights that add up: digests of disjoint parts sum to that of their union.

Definition. Let bits(r, c) be the bit pattern of the element at row r (index in dimension 0) and column c
(flat index in the other dimensions) of the GLOBAL tensor, in the wire dtype, read as a signed integer of its
width. Then, modulo 2^64,

    digest(box of tensor) = S(name) * sum over the box of  R(r) * K(c) * bits(r, c)

with R and K odd 64-bit hashes (splitmix64) of the index and S an odd hash of the tensor's name. (r, c) is the
element's global flat index, split in two, so a part's digest does not depend on which rank holds it or how it
lies in memory; digests of disjoint parts add up. Odd factors are invertible, so a change of a single element
always changes the digest; permuted, shifted or swapped rows, columns and layers change it except with
probability of about 2^-60. The digest protects against faults, not against an attacker.

The comparison after a push works as follows. Cut every tensor along all borders of all rollout ranks' boxes:
the parts are its *atoms* (`digest_atoms`). Each learner rank computes its share of every atom from its own
shard, in one pass, and the shares are summed over learner ranks: learner rank 0 then knows every atom, each
element counted once. Every rollout rank reports the digest of each of its boxes as they lie in its live
parameters. A box is a union of atoms, so `disagreement` checks it against the sum of the learner's atoms
inside it: this verifies every byte on every rank, replicated ones on each replica. The digest of a complete
policy (`model_digest`) is the sum over its tensors. In the learner's atoms every element counts once; in the
reports of a rollout server's TP ranks equal boxes count once. So both sides compute the same 64 bits without
another pass.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.weights.geometry.boxes import Box

MASK: Final = (1 << 64) - 1
_ROW_SEED: Final = 0x5061_6365_6C69_6E65
_COLUMN_SEED: Final = 0x7765_6967_6874_7321
_GOLDEN: Final = 0x9E37_79B9_7F4A_7C15


def name_factor(name: str) -> int:
    """Returns S(name): odd, 64 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1


def row_factors(first: int, last: int) -> npt.NDArray[np.uint64]:
    """Returns R(r) for first <= r < last."""
    return _splitmix64(np.arange(first, last, dtype=np.uint64) + np.uint64(_ROW_SEED))


def column_factors(global_shape: tuple[int, ...], box: Box) -> npt.NDArray[np.uint64]:
    """Returns K(c) for the columns of a box: its trailing dimensions, flattened."""
    return _column_factors(global_shape[1:], box.start[1:], box.stop[1:])


@lru_cache(maxsize=256)
def _column_factors(
    shape: tuple[int, ...], start: tuple[int, ...], stop: tuple[int, ...]
) -> npt.NDArray[np.uint64]:
    flat = np.zeros((), dtype=np.uint64)
    for extent, low, high in zip(shape, start, stop, strict=True):
        index = np.arange(low, high, dtype=np.uint64)
        flat = flat[..., None] * np.uint64(extent) + index
    return _splitmix64(flat.reshape(-1) + np.uint64(_COLUMN_SEED))


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Applies the finaliser of SplitMix64 (Steele, Lea and Flood 2014) and makes the result odd."""
    x = x * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def signed(value: int) -> int:
    """Returns the int64 that has the same bits as this unsigned one."""
    return value - (1 << 64) if value >> 63 else value
