"""Reads a teacher's likeliest tokens from the answer of vLLM's completions endpoint. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.core.errors import RewardError, RewardErrorKind
from paceline.core.samples.teacher_top_k import TeacherTopK
from paceline.core.text import one_line
from paceline.reward.outside.openai_server import read_json, shown


def read_top_k(content: bytes, token_ids: Sequence[int], wanted: Sequence[int], top_k: int) -> TeacherTopK:
    """Returns the likeliest tokens at the places `wanted` of a sequence.

    An entry of `prompt_logprobs` maps token ids to {"logprob": ...}: the likeliest ones, and the sequence's
    own token if it is not among them.

    Args:
        token_ids: the sequence that was sent.
        wanted: places in it, in ascending order, without the first.

    Raises:
        RewardError: WRONG_TYPE, if the answer is not about this sequence or lacks tokens.
    """
    try:
        places: Any = read_json(content)["choices"][0]["prompt_logprobs"]
        entries = [places[place] for place in wanted]
        likeliest = [_likeliest(entries[row], token_ids[place], top_k) for row, place in enumerate(wanted)]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise _wrong(
            f"the answer has no prompt_logprobs of {len(token_ids)} tokens: {shown(content)}"
        ) from None
    if len(places) != len(token_ids):
        raise _wrong(f"the answer has {len(places)} prompt_logprobs for {len(token_ids)} tokens")
    return TeacherTopK(
        token_ids=np.array([[token for _, token in row] for row in likeliest], np.int32).reshape(-1, top_k),
        log_probs=np.array([[value for value, _ in row] for row in likeliest], np.float32).reshape(-1, top_k),
    )


def _likeliest(entry: Mapping[str, Mapping[str, Any]], own: int, top_k: int) -> list[tuple[float, int]]:
    """Returns the K likeliest tokens of an entry with their log-probs, the likeliest first."""
    if str(own) not in entry:
        raise _wrong(f"the answer is about another sequence: it has no log-prob of its token {own}")
    pairs = [(float(part["logprob"]), int(token)) for token, part in entry.items()]
    likeliest = heapq.nlargest(top_k, pairs)
    if len(likeliest) < top_k:
        raise _wrong(f"the answer has {len(likeliest)} log-probs per token where {top_k} were asked for")
    return likeliest


def _wrong(sentence: str) -> RewardError:
    return RewardError(one_line(sentence), kind=RewardErrorKind.WRONG_TYPE)
