"""Plans a step: cuts its rows into mini-batches by prompts, and these into micro-batches over the ranks.

The plan follows from the rows' lengths and the model's shape alone, so every rank computes the same one
without communication. The same micro-batches serve old log-probs, reference, values and the update, so on
policy the first update sees a ratio of 1.

The unit is the chunk: a run of prompts whose size divides every mini-batch size in use (the critic's may
differ from the actor's). A chunk is cut into the same number of micro-batches on each rank; some may be
empty, because sharded models need every rank in every forward pass. The ranks wait for each other in every
layer, so micro-batches that run at the same time have nearly equal arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from paceline.core.errors import ConfigError, DataError
from paceline.learner.batch.arithmetic import Arithmetic, RowLength
from paceline.learner.batch.deal import Bin, Bundle, deal

CPU_TOKEN_BUDGET = 3072
"""Larger micro-batches run slower on a CPU: their activations leave the caches (a fifth slower at 8 k)."""

Rows = tuple[int, ...]
"""Indices of rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Prompts in a row; `micro_batches[rank][k]` are the rows of a rank's k-th micro-batch, by length.

    Attributes:
        cost: arithmetic of all micro-batches.
        longest: arithmetic of the costliest k-th micro-batch of any rank, added up over k.
    """

    rows: Rows
    micro_batches: tuple[tuple[Rows, ...], ...]
    cost: int
    longest: int

    @property
    def num_micro_batches(self) -> int:
        """The same on every rank."""
        return len(self.micro_batches[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """All chunks of a step, in order."""

    chunks: tuple[Chunk, ...]
    prompts_per_chunk: int

    @property
    def imbalance(self) -> float:
        """How much longer the step takes than one of even micro-batches, by arithmetic: 0.1 is a tenth."""
        world_size = len(self.chunks[0].micro_batches)
        longest = sum(chunk.longest for chunk in self.chunks)
        return longest * world_size / sum(chunk.cost for chunk in self.chunks) - 1.0

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
    rows: Sequence[RowLength],
    *,
    mini_batch_sizes: Sequence[int],
    world_size: int,
    token_budget: int,
    arithmetic: Arithmetic,
) -> BatchPlan:
    """Plans a step.

    Args:
        rows: all rows of the step, samples of one prompt next to each other.
        mini_batch_sizes: prompts per optimizer step, of every network that is updated.
        world_size: number of ranks.
        token_budget: most tokens of one micro-batch.
        arithmetic: of the policy.

    Raises:
        DataError: there are no rows, or samples of one prompt are not next to each other.
        ConfigError: one row alone exceeds the token budget.
    """
    if not rows:
        raise DataError("the step has no rows to train on")
    longest = max(row.num_tokens for row in rows)
    if longest > token_budget:
        raise ConfigError(
            f"a sequence of {longest} tokens is over the token budget of {token_budget}; raise "
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
        bundles = [
            Bundle(rows=(index,), num_tokens=rows[index].num_tokens, cost=arithmetic.of_row(rows[index]))
            for group in groups[first : first + width]
            for index in group
        ]
        chunks.append(_arrange(deal(bundles, multiple=world_size, budget=token_budget), rows, world_size))
    return BatchPlan(chunks=tuple(chunks), prompts_per_chunk=width)


def effective_budget(token_budget: int, device_type: str, longest: int) -> int:
    """The budget to cut by: on a CPU at most CPU_TOKEN_BUDGET, or the longest row if that is longer."""
    return min(token_budget, max(longest, CPU_TOKEN_BUDGET)) if device_type == "cpu" else token_budget


def _arrange(bins: Sequence[Bin], rows: Sequence[RowLength], world_size: int) -> Chunk:
    """Has bins of similar cost run at the same time, the costliest first; ranks have similar sums, too."""
    ordered = sorted(bins, key=lambda bundles: (-_cost(bundles), [bundle.rows for bundle in bundles]))
    rounds = [ordered[first : first + world_size] for first in range(0, len(ordered), world_size)]
    by_rank = zip(*(turn[::-1] if number % 2 else turn for number, turn in enumerate(rounds)), strict=True)
    micro_batches = tuple(tuple(_in_order(bundles, rows) for bundles in bins) for bins in by_rank)
    return Chunk(
        rows=tuple(sorted(index for bundles in bins for bundle in bundles for index in bundle.rows)),
        micro_batches=micro_batches,
        cost=sum(map(_cost, bins)),
        longest=sum(_cost(turn[0]) for turn in rounds),
    )


def _cost(bundles: Bin) -> int:
    return sum(bundle.cost for bundle in bundles)


def _in_order(bundles: Bin, rows: Sequence[RowLength]) -> Rows:
    indices = [index for bundle in bundles for index in bundle.rows]
    return tuple(sorted(indices, key=lambda index: (rows[index].num_tokens, index)))
