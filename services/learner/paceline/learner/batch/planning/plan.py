"""Plans a step: cuts its rows into chunks by prompts, and these into micro-batches over the ranks.

The plan follows from the rows' lengths and the model's shape alone, so every rank computes the same one
without communication. Old log-probs, reference, values and the update use the same micro-batches, so on
policy the first update has a ratio of 1.

The unit is the chunk, a run of prompts whose number divides every mini-batch size (the critic's may differ
from the actor's). A chunk is cut by its own rows only, so it can be computed before later chunks are known.
It has the same number of micro-batches on each rank; some may be empty, because sharded models need every
rank in every forward pass. The ranks wait for each other in every layer, so micro-batches that run at the
same time have nearly equal arithmetic.

With shared prompts, rows of a prompt stay together as far as the budget and even arithmetic allow: several
cuts of the groups are tried, from whole groups to single rows, and the fastest is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np

from paceline.core.errors import ConfigError, DataError
from paceline.learner.batch.planning.arithmetic import Arithmetic, RowCosts, RowLength
from paceline.learner.batch.planning.bin_packing import Bundle, pack_bins
from paceline.service.imports import without_collections

CPU_TOKEN_BUDGET = 3072
"""Larger micro-batches run slower on a CPU: their activations leave the caches (a fifth slower at 8 k)."""

Rows = tuple[int, ...]
"""Places of rows in the step's batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A run of prompts; `micro_batches[rank][k]` are the rows of a rank's k-th micro-batch, by length.

    Attributes:
        cost: arithmetic of all micro-batches.
        longest: arithmetic of the costliest k-th micro-batch of any rank, added up over k.
        share_prompts: whether rows of a micro-batch with the same prompt have one copy of it.
    """

    rows: Rows
    micro_batches: tuple[tuple[Rows, ...], ...]
    cost: int
    longest: int
    share_prompts: bool = False

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches, which is the same on every rank."""
        return len(self.micro_batches[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """All chunks of a step, in order."""

    chunks: tuple[Chunk, ...]
    prompts_per_chunk: int

    @property
    def imbalance(self) -> float:
        """How much longer the step takes than with equally costly micro-batches: 0.1 is a tenth."""
        num_data_ranks = len(self.chunks[0].micro_batches)
        return self.longest * num_data_ranks / self.cost - 1.0

    @property
    def longest(self) -> int:
        """The arithmetic that the step waits for."""
        return sum(chunk.longest for chunk in self.chunks)

    @property
    def cost(self) -> int:
        """The arithmetic of all ranks."""
        return sum(chunk.cost for chunk in self.chunks)

    def mini_batches(self, num_prompts: int) -> list[range]:
        """Returns mini-batches of `num_prompts` prompts as ranges of chunk indices; the last may be smaller.

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
        """Returns the rows of one rank, in the order of its micro-batches."""
        return [row for chunk in self.chunks for rows in chunk.micro_batches[rank] for row in rows]


def plan_batch(
    rows: Sequence[RowLength],
    *,
    prompts_per_chunk: int,
    make: Callable[[Sequence[RowLength], int], Chunk],
) -> BatchPlan:
    """Plans the mini-batches of a step.

    Args:
        rows: all rows of the step, samples of one prompt next to each other.
        prompts_per_chunk: divides every mini-batch size.
        make: called with a chunk's rows and the place of the first row; plans the chunk as `plan_chunk` does.

    Raises:
        DataError: there are no rows, or samples of one prompt are not next to each other.
        ConfigError: a single row exceeds the token budget.
    """
    if not rows:
        raise DataError("the step has no rows to train on")
    starts = [next(run)[0] for _, run in groupby(enumerate(rows), key=lambda pair: pair[1].prompt_id)]
    if len(starts) != len({row.prompt_id for row in rows}):
        raise DataError(
            "rows of one prompt must lie next to each other: order them by (prompt id, sample index)"
        )
    ends = [*starts[::prompts_per_chunk], len(rows)]
    return BatchPlan(
        chunks=tuple(make(rows[first:end], first) for first, end in pairwise(ends)),
        prompts_per_chunk=prompts_per_chunk,
    )


@without_collections()
def plan_chunk(
    rows: Sequence[RowLength],
    first_row: int,
    *,
    num_data_ranks: int,
    token_budget: int,
    arithmetic: Arithmetic,
    share_prompts: bool = False,
) -> Chunk:
    """Cuts a chunk into micro-batches.

    Args:
        rows: rows of the chunk, samples of one prompt next to each other.
        first_row: place of the chunk's first row in the step's batch.
        num_data_ranks: ranks that get different rows.
        token_budget: most tokens of one micro-batch.
        share_prompts: whether rows of a micro-batch with the same prompt have one copy of it.

    Raises:
        ConfigError: a single row exceeds the token budget.
    """
    longest = max(rows, key=lambda row: row.num_budgeted)
    if longest.num_budgeted > token_budget:
        patches = f" and {longest.num_patches} patches of images" if longest.num_patches else ""
        raise ConfigError(
            f"a sequence of {longest.num_tokens} tokens{patches} is over the token budget of "
            f"{token_budget}; raise actor.ppo_max_token_len_per_gpu (or sft.max_token_len_per_gpu)"
        )
    cut = _Cut(
        rows=rows,
        first_row=first_row,
        num_ranks=num_data_ranks,
        budget=token_budget,
        arithmetic=arithmetic,
        share_prompts=share_prompts,
    )
    return cut.sharing_prompts() if share_prompts else cut.chunk([(index,) for index in range(len(rows))])


def effective_budget(token_budget: int, device_type: str, longest: int) -> int:
    """Returns the budget to cut by: on a CPU at most CPU_TOKEN_BUDGET, or the longest row if longer."""
    return min(token_budget, max(longest, CPU_TOKEN_BUDGET)) if device_type == "cpu" else token_budget


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """Cuts `rows`, by index, into micro-batches; the first row's place is `first_row`."""

    rows: Sequence[RowLength]
    first_row: int
    num_ranks: int
    budget: int
    arithmetic: Arithmetic
    share_prompts: bool

    def sharing_prompts(self) -> Chunk:
        """Cuts so that rows of a prompt that are in the same micro-batch have one copy of it."""
        ordered = sorted(range(len(self.rows)), key=self._order.__getitem__)
        groups = [list(run) for _, run in groupby(ordered, key=lambda index: self.rows[index].prompt_id)]
        largest = max(map(len, groups))
        sizes = [-(-largest >> halvings) for halvings in range(largest.bit_length())]
        cuts = dict.fromkeys(
            tuple(part for group in groups for part in self._parts(group, size)) for size in [*sizes, 1]
        )
        return min(map(self.chunk, cuts), key=lambda chunk: (chunk.longest, chunk.num_micro_batches))

    def _parts(self, group: Sequence[int], size: int) -> list[Rows]:
        """Splits a group, by length, into the fewest parts of at most `size` rows that fit a micro-batch."""
        for count in range(-(-len(group) // size), len(group)):
            most = group[(len(group) - 1) % count :: count]  # the part with the longest rows
            if self._num_tokens(most) > self.budget:
                continue
            parts = [tuple(group[first::count]) for first in range(count)]
            if all(self._num_tokens(part) <= self.budget for part in parts):
                return parts
        return [(index,) for index in group]

    def chunk(self, parts: Sequence[Rows]) -> Chunk:
        """Packs parts into bins; bins of similar cost run together, which also evens out the ranks' sums."""
        cost = self._costs.of
        bundles = list(map(Bundle, parts, map(self._num_tokens, parts), map(cost, parts)))
        packed = pack_bins(bundles, multiple=self.num_ranks, budget=self.budget)
        bins = [
            sorted([index for part, _, _ in bundles for index in part], key=self._order.__getitem__)
            for bundles in packed
        ]
        costed = sorted(((cost(indices), indices) for indices in bins), key=lambda pair: (-pair[0], pair[1]))
        rounds = [costed[first : first + self.num_ranks] for first in range(0, len(bins), self.num_ranks)]
        turns = [turn[::-1] if number % 2 else turn for number, turn in enumerate(rounds)]
        return Chunk(
            rows=self._places(range(len(self.rows))),
            micro_batches=tuple(
                tuple(self._places(indices) for _, indices in turn) for turn in zip(*turns, strict=True)
            ),
            cost=sum(number for number, _ in costed),
            longest=sum(turn[0][0] for turn in rounds),
            share_prompts=self.share_prompts,
        )

    @cached_property
    def _costs(self) -> RowCosts:
        return RowCosts(self.arithmetic, self.rows, share_prompts=self.share_prompts)

    @cached_property
    def _order(self) -> list[int]:
        """Each row's position by length; with shared prompts, by prompt first."""
        tokens = [row.num_tokens for row in self.rows]
        prompts = [row.prompt_id if self.share_prompts else 0 for row in self.rows]
        positions: list[int] = np.argsort(np.lexsort((tokens, prompts))).tolist()
        return positions

    @cached_property
    def _prompts(self) -> list[int]:
        """Tokens of each row's prompt and patches of its images."""
        return [row.num_prompt_tokens + row.num_patches for row in self.rows]

    @cached_property
    def _responses(self) -> list[int]:
        return [row.num_response_tokens for row in self.rows]

    def _num_tokens(self, part: Sequence[int]) -> int:
        """Counts a part's tokens; its rows share the prompt and its images, which count once."""
        return self._prompts[part[0]] + sum(map(self._responses.__getitem__, part))

    def _places(self, indices: Iterable[int]) -> Rows:
        return tuple([self.first_row + index for index in indices])
