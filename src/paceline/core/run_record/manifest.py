"""The text of a checkpoint's manifest: JSON with its own digest. The file is written last."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from paceline.core.errors import CheckpointError

MANIFEST = "manifest.json"
SCHEMA = 2


def manifest_text(fields: Mapping[str, Any]) -> str:
    """Returns the file's text, with schema and digest."""
    tree = {**fields, "schema": SCHEMA}
    return json.dumps({**tree, "digest": _digest(tree)}, indent=1, sort_keys=True)


def manifest_fields(text: str | bytes, *, origin: object) -> dict[str, Any]:
    """Reads the fields that `manifest_text` wrote.

    Raises:
        CheckpointError: the text is incomplete or changed, or has another schema.
    """
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{origin} is not JSON: {error}; use another checkpoint") from error
    if not isinstance(tree, dict) or tree.get("schema") != SCHEMA:
        schema = tree.get("schema") if isinstance(tree, dict) else None
        raise CheckpointError(f"{origin} has schema {schema!r}, this version reads {SCHEMA}")
    stated = tree.pop("digest", None)
    if stated != _digest(tree):
        raise CheckpointError(
            f"{origin} was changed after it was written: its digest is {_digest(tree)}, it says {stated}; "
            "use another checkpoint"
        )
    return tree


def _digest(tree: Mapping[str, Any]) -> str:
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
