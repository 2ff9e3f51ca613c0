"""How large a message and its parts may be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits that decoders enforce.

    Args:
        max_bytes: of a message or blob; a larger one is rejected unread.
        max_tokens: of an array of token ids.
        max_text_chars: of a text field: a response, a ground truth.
        max_samples: of a prompt group.
        max_items: of any other list or mapping: stop tokens, reward components.
        max_depth: of nesting in a reward context's `extra`.
    """

    max_bytes: int = 64 * 2**20
    max_tokens: int = 2**20
    max_text_chars: int = 2**20
    max_samples: int = 4096
    max_items: int = 1024
    max_depth: int = 8


DEFAULT_LIMITS = Limits()
