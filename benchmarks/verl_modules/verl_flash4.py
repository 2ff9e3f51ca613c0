"""Gives flash-attn-4 the longest sequence of a packed batch as a number; verl loads this in all processes.

transformers (5.17 and 5.19) gives it as a tensor without dimensions. flash-attn-4 has it in the key under
which it keeps its compiled backward kernel, and no tensor equals another, so each call would compile again.
The number is read once per batch, and not in each layer.
"""

from __future__ import annotations

from typing import Any

import transformers.modeling_flash_attention_utils as flash

_from_positions = flash.prepare_fa_kwargs_from_position_ids
_last: tuple[Any, Any] = (None, None)


def prepare_fa_kwargs_from_position_ids(position_ids: Any) -> Any:
    """Returns the bounds of the sequences of queries and of keys, and the longest of each."""
    global _last
    if _last[0] is not position_ids:
        bounds, (longest_query, longest_key) = _from_positions(position_ids)
        _last = position_ids, (bounds, (int(longest_query), int(longest_key)))
    return _last[1]


flash.prepare_fa_kwargs_from_position_ids = prepare_fa_kwargs_from_position_ids
