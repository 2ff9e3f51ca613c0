"""Digests of blobs and of files that grow with a run's tokens, which the journal records.

They are SHA-256, cut to 128 bits, which RFC 6920 calls sha-256-128; processors have instructions for it. A
digest names its kind; one without a name, of an earlier build, is BLAKE2b with 128 bits.

docs/decisions/0045-digests-name-their-kind.md
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, Final

from paceline.core.training import DIGEST_BYTES

SHA_256_128: Final = "sha-256-128:"
"""The name of the kind, with which its digests begin."""

DIGEST: Final = re.compile(rf"(?:{SHA_256_128})?[0-9a-f]{{{2 * DIGEST_BYTES}}}")
"""The form of a digest."""


def content_digest(content: bytes | memoryview, *, like: str = SHA_256_128) -> str:
    """Returns the digest of bytes, of the same kind as the digest `like`."""
    return _text(_hash(like, content), like)


def file_digest(path: Path, *, like: str = SHA_256_128) -> str:
    """Returns the digest of a file's content, of the same kind as the digest `like`."""
    with path.open("rb") as file:
        return _text(hashlib.file_digest(file, lambda: _hash(like)), like)


def _hash(like: str, content: bytes | memoryview = b"") -> Any:
    if like.startswith(SHA_256_128):
        return hashlib.sha256(content)
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES)


def _text(content: Any, like: str) -> str:
    name = SHA_256_128 if like.startswith(SHA_256_128) else ""
    return f"{name}{content.digest()[:DIGEST_BYTES].hex()}"
