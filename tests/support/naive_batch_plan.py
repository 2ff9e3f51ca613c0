"""Cuts chunks as the learner's plan does, in quadratic time: the reference for its equality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from paceline.learner.batch.planning.arithmetic import Arithmetic, RowLength
from paceline.learner.batch.planning.bin_packing import Bin, Bundle
from paceline.learner.batch.planning.plan import Chunk, Rows


def naive_chunk(
    rows: Sequence[RowLength],
    *,
    num_data_ranks: int,
    token_budget: int,
    arithmetic: Arithmetic,
    share_prompts: bool,
) -> Chunk:
    """The chunk of rows that begin at place 0."""
    groups = [
        [index for index, _ in run] for _, run in groupby(enumerate(rows), key=lambda pair: pair[1].prompt_id)
    ]
    cut = _Cut(rows=rows, first_row=0, num_ranks=num_data_ranks, budget=token_budget, arithmetic=arithmetic)
    return cut.sharing_prompts(groups) if share_prompts else cut.row_by_row(groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """Cuts prompt groups of `rows`, by index, into micro-batches; the first row's place is `first_row`."""

    rows: Sequence[RowLength]
    first_row: int
    num_ranks: int
    budget: int
    arithmetic: Arithmetic

    def row_by_row(self, groups: Sequence[Sequence[int]]) -> Chunk:
        """Each row has its own copy of its prompt."""
        return self._chunk([(index,) for group in groups for index in group], share_prompts=False)

    def sharing_prompts(self, groups: Sequence[Sequence[int]]) -> Chunk:
        """Rows of a prompt that are in the same micro-batch have one copy of it."""
        largest = max(map(len, groups))
        sizes = dict.fromkeys(-(-largest >> halvings) or 1 for halvings in range(largest.bit_length()))
        chunks = [
            self._chunk([part for group in groups for part in self._parts(group, size)], share_prompts=True)
            for size in [*sizes, 1]
        ]
        return min(chunks, key=lambda chunk: (chunk.longest, chunk.num_micro_batches))

    def _parts(self, group: Sequence[int], size: int) -> list[Rows]:
        """A group in as few parts as hold at most `size` rows and fit into a micro-batch."""
        ordered = sorted(group, key=lambda index: (self.rows[index].num_tokens, index))
        for count in range(-(-len(group) // size), len(group)):
            parts = [tuple(ordered[first::count]) for first in range(count)]
            if all(self._num_tokens(part) <= self.budget for part in parts):
                return parts
        return [(index,) for index in ordered]

    def _chunk(self, parts: Sequence[Rows], *, share_prompts: bool) -> Chunk:
        """Deals parts; has bins of similar cost run together, so that the ranks' sums are similar, too."""

        def cost(indices: Sequence[int]) -> int:
            return self.arithmetic.of_rows(
                (self.rows[index] for index in indices), share_prompts=share_prompts
            )

        bundles = [Bundle(rows=part, num_tokens=self._num_tokens(part), cost=cost(part)) for part in parts]
        packed = naive_pack_bins(bundles, multiple=self.num_ranks, budget=self.budget)
        bins = [self._in_order(bundles, share_prompts=share_prompts) for bundles in packed]
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
            share_prompts=share_prompts,
        )

    def _places(self, indices: Sequence[int]) -> Rows:
        return tuple(self.first_row + index for index in indices)

    def _num_tokens(self, part: Rows) -> int:
        """With one copy of the prompt and its images, which all rows of the part have."""
        first = self.rows[part[0]]
        prompt = first.num_prompt_tokens + first.num_patches
        return prompt + sum(self.rows[index].num_response_tokens for index in part)

    def _in_order(self, bundles: Bin, *, share_prompts: bool) -> Rows:
        """By length; with shared prompts first by prompt."""

        def key(index: int) -> tuple[int, int, int]:
            row = self.rows[index]
            return row.prompt_id if share_prompts else 0, row.num_tokens, index

        return tuple(sorted((index for bundle in bundles for index in bundle.rows), key=key))


def naive_pack_bins(bundles: Sequence[Bundle], *, multiple: int, budget: int) -> list[Bin]:
    """Fills bins of at most `budget` tokens, the number of bins a multiple of `multiple`, some maybe empty.

    There are no more bins than filling them one after the other takes. If the bundles do not fit into as many
    evenly, they stay as they were filled.
    """
    filled = _first_fit(bundles, budget)
    count = -(-len(filled) // multiple) * multiple
    return _pack_evenly(bundles, count, budget) or [*filled, *[()] * (count - len(filled))]


def _pack_evenly(bundles: Sequence[Bundle], num_bins: int, budget: int) -> list[Bin]:
    """The costliest bundle first, each to the cheapest bin with room; [] if a bundle finds no room."""
    bins: list[list[Bundle]] = [[] for _ in range(num_bins)]
    costs, room = [0] * num_bins, [budget] * num_bins
    for bundle in sorted(bundles, key=lambda b: (-b.cost, b.rows)):
        fitting = [place for place in range(num_bins) if room[place] >= bundle.num_tokens]
        if not fitting:
            return []
        place = min(fitting, key=costs.__getitem__)
        bins[place].append(bundle)
        costs[place] += bundle.cost
        room[place] -= bundle.num_tokens
    return [tuple(bundles) for bundles in bins]


def _first_fit(bundles: Sequence[Bundle], budget: int) -> list[Bin]:
    """The bundle with the most tokens first, each into the first bin with room."""
    bins: list[list[Bundle]] = [[]]
    room = [budget]
    for bundle in sorted(bundles, key=lambda b: (-b.num_tokens, b.rows)):
        place = next((b for b, free in enumerate(room) if free >= bundle.num_tokens), None)
        if place is None:
            bins.append([])
            room.append(budget)
            place = len(bins) - 1
        bins[place].append(bundle)
        room[place] -= bundle.num_tokens
    return [tuple(bundles) for bundles in bins]
