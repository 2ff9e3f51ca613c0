"""Digests of a run's files, which the journal records and `paceline verify` recomputes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from paceline.core.training import DIGEST_BYTES


def digest_of(content: bytes) -> str:
    """Returns the BLAKE2b digest of bytes, as 32 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def file_digest(path: Path) -> str:
    """Returns the digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)).hexdigest()
