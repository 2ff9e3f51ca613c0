"""Plans a step: cuts its rows into mini-batches by prompts, over ranks and into micro-batches by tokens.

The plan follows from the rows' lengths alone, so every rank computes the same one without communication. The
same micro-batches serve old log-probs, reference, values and the update, so on policy the first update sees a
ratio of 1.

The unit is the chunk: a run of prompts whose size divides every mini-batch size in use (the critic's may
differ from the actor's). A chunk is spread over the ranks and cut into the same number of micro-batches on
each of them; some may be empty, because sharded models need every rank in every forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from paceline.core.errors import ConfigError, DataError

CPU_TOKEN_BUDGET = 3072
"""Larger micro-batches run slower on a CPU: their activations leave the caches (a fifth slower at 8 k)."""

Bin = tuple[int, ...]
"""Indices of rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLength:
    """What the plan needs to know of a row; rows are ordered by (prompt id, sample index)."""

    prompt_id: int
    num_prompt_tokens: int
    num_response_tokens: int

    @property
    def num_tokens(self) -> int:
        """Prompt and response together."""
        return self.num_prompt_tokens + self.num_response_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Prompts in a row; `micro_batches[rank][k]` are the rows of a rank's k-th micro-batch, by length."""

    rows: Bin
    micro_batches: tuple[tuple[Bin, ...], ...]

    @property
    def num_micro_batches(self) -> int:
        """The same on every rank."""
        return len(self.micro_batches[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """All chunks of a step, in order."""

    chunks: tuple[Chunk, ...]
    prompts_per_chunk: int

    def mini_batches(self, num_prompts: int) -> list[range]:
        """Runs of chunk indices that form mini-batches of `num_prompts` prompts; the last may be smaller.

        Raises:
            ConfigError: the chunk size does not divide `num_prompts`.
        """
        if num_prompts % self.prompts_per_chunk:
            raise ConfigError(
                f"a mini-batch of {num_prompts} prompts is no multiple of the chunk of "
                f"{self.prompts_per_chunk}"
            )
        width = num_prompts // self.prompts_per_chunk
        total = len(self.chunks)
        return [range(first, min(first + width, total)) for first in range(0, total, width)]

    def rows_of(self, rank: int) -> list[int]:
        """The rows of one rank, in the order of its micro-batches."""
        return [row for chunk in self.chunks for rows in chunk.micro_batches[rank] for row in rows]


def plan_batch(
    rows: Sequence[RowLength], *, mini_batch_sizes: Sequence[int], world_size: int, token_budget: int
) -> BatchPlan:
    """Plans a step.

    Args:
        rows: all rows of the step, samples of one prompt next to each other.
        mini_batch_sizes: prompts per optimizer step, of every network that is updated.
        world_size: number of ranks.
        token_budget: most tokens of one micro-batch.

    Raises:
        DataError: there are no rows, or samples of one prompt are not next to each other.
        ConfigError: one row alone exceeds the token budget.
    """
    lengths = [row.num_tokens for row in rows]
    if not lengths:
        raise DataError("the step has no rows to train on")
    if max(lengths) > token_budget:
        raise ConfigError(
            f"a sequence of {max(lengths)} tokens is over the token budget of {token_budget}; raise "
            "actor.ppo_max_token_len_per_gpu (or sft.max_token_len_per_gpu)"
        )
    groups = [
        [index for index, _ in run] for _, run in groupby(enumerate(rows), key=lambda pair: pair[1].prompt_id)
    ]
    if len(groups) != len({row.prompt_id for row in rows}):
        raise DataError(
            "rows of one prompt must lie next to each other: order them by (prompt id, sample index)"
        )
    width = math.gcd(*mini_batch_sizes)
    chunks = []
    for first in range(0, len(groups), width):
        members = [index for group in groups[first : first + width] for index in group]
        chunks.append(_cut(members, lengths, world_size, token_budget))
    return BatchPlan(chunks=tuple(chunks), prompts_per_chunk=width)


def effective_budget(token_budget: int, device_type: str, longest: int) -> int:
    """The budget to cut by: on a CPU at most CPU_TOKEN_BUDGET, or the longest row if that is longer."""
    return min(token_budget, max(longest, CPU_TOKEN_BUDGET)) if device_type == "cpu" else token_budget


def deal_evenly(members: Sequence[int], lengths: Sequence[int], num_bins: int) -> list[Bin]:
    """Deals rows to bins, longest first, each to the bin with the fewest tokens; the first of equals."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [0] * num_bins
    for index in sorted(members, key=lambda i: (-lengths[i], i)):
        lightest = loads.index(min(loads))
        bins[lightest].append(index)
        loads[lightest] += lengths[index]
    return [tuple(sorted(rows, key=lambda i: (lengths[i], i))) for rows in bins]


def _cut(members: Sequence[int], lengths: Sequence[int], world_size: int, budget: int) -> Chunk:
    shares = deal_evenly(members, lengths, world_size)
    filled = [_first_fit(share, lengths, budget) for share in shares]
    count = max(len(bins) for bins in filled)
    by_rank = []
    for share, fallback in zip(shares, filled, strict=True):
        even = deal_evenly(share, lengths, count)
        fits = all(sum(lengths[i] for i in rows) <= budget for rows in even)
        by_rank.append(tuple(even) if fits else (*fallback, *[()] * (count - len(fallback))))
    return Chunk(rows=tuple(members), micro_batches=tuple(by_rank))


def _first_fit(members: Sequence[int], lengths: Sequence[int], budget: int) -> list[Bin]:
    """Fills bins of at most `budget` tokens, longest row first, each into the first bin with room."""
    bins: list[list[int]] = [[]]
    room = [budget]
    for index in sorted(members, key=lambda i: (-lengths[i], i)):
        place = next((b for b, free in enumerate(room) if free >= lengths[index]), None)
        if place is None:
            bins.append([])
            room.append(budget)
            place = len(bins) - 1
        bins[place].append(index)
        room[place] -= lengths[index]
    return [tuple(sorted(rows, key=lambda i: (lengths[i], i))) for rows in bins]
