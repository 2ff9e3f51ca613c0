"""Digests of short texts, which the journal records and `paceline verify` recomputes."""

from __future__ import annotations

import hashlib

from paceline.core.training import DIGEST_BYTES


def digest_of(content: bytes) -> str:
    """Returns the BLAKE2b digest of bytes, as 32 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest()
