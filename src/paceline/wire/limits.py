"""How large a message may be before it is rejected unread."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Caps that decoders enforce.

    Args:
        max_bytes: of one whole message or blob.
        max_tokens: of one array of token ids.
        max_text_chars: of one text field: a response, a ground truth.
        max_samples: of one prompt group.
        max_items: of one list or mapping that is neither of the above: stop tokens, reward components.
        max_depth: of nesting in a reward context's `extra`.
    """

    max_bytes: int = 64 * 2**20
    max_tokens: int = 2**20
    max_text_chars: int = 2**20
    max_samples: int = 4096
    max_items: int = 1024
    max_depth: int = 8


DEFAULT_LIMITS = Limits()
