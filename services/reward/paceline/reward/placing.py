"""Maps parts of a reward from characters of a response's text to its tokens. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from paceline.data.prompts import Decoder, TokenIds

TokenRewards = tuple[tuple[int, float], ...]
"""(position among the response's tokens, part of the reward)."""


def token_rewards(
    placed: Sequence[tuple[int, float]], token_ids: TokenIds, tokenizer: Decoder, *, first: int = 0
) -> TokenRewards:
    """Returns pairs (position, part): the token with a step's last character gets the step's part.

    Args:
        placed: (end, part): a step ends before character `end` of the text.
        token_ids: token ids of the text, including special tokens.
        tokenizer: the tokenizer that decoded the text.
        first: position of the first of these tokens in the response.
    """

    def num_chars(count: int) -> int:
        return len(tokenizer.decode(token_ids[:count], skip_special_tokens=True))

    rewards: dict[int, float] = {}
    for end, part in placed:
        # Binary search for the fewest tokens whose text reaches `end`.
        count = bisect.bisect_left(range(len(token_ids) + 1), end, lo=1, key=num_chars)
        position = first + min(count, len(token_ids)) - 1
        rewards[position] = rewards.get(position, 0.0) + part
    return tuple(sorted(rewards.items()))
