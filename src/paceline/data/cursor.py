"""Walks deterministically over the prompt ids of a set; can be saved and resumed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from paceline.core.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class CursorState:
    """A position in the walk: the epoch, and the number of prompts taken from it."""

    epoch: int
    position: int


class PromptCursor:
    """Yields batches of distinct prompt ids; an epoch visits each id once, ordered by seed and epoch.

    Ids left over at the end of an epoch that do not fill a batch are skipped, so that no id appears twice in
    a batch.

    Args:
        ids: the prompt ids, in any order.
        shuffle: False walks in ascending order.
        stream: the set's number, so that sets with the same seed have different orders.
        ranks: the rank of each id; every epoch takes ids of lower rank first. None: all ranks are equal.
    """

    def __init__(
        self,
        ids: Sequence[int],
        *,
        seed: int,
        shuffle: bool = True,
        stream: int = 0,
        ranks: Mapping[int, int] | None = None,
    ) -> None:
        self._ids = sorted(ids)
        self._seed, self._shuffle, self._stream = seed, shuffle, stream
        self._levels: Mapping[int, list[int]] = {0: self._ids}
        if ranks is not None:
            by_rank = sorted(self._ids, key=ranks.__getitem__)
            self._levels = {rank: list(level) for rank, level in groupby(by_rank, ranks.__getitem__)}
        self._epoch, self._position = 0, 0
        self._order = self._epoch_order()

    @property
    def num_ids(self) -> int:
        """The number of ids in an epoch."""
        return len(self._ids)

    def __contains__(self, prompt_id: int) -> bool:
        place = bisect_left(self._ids, prompt_id)
        return place < len(self._ids) and self._ids[place] == prompt_id

    def ranges(self) -> list[tuple[int, int, int]]:
        """Returns the runs of consecutive ids with the same rank: first and last id, and the rank."""
        runs = []
        for rank, level in self._levels.items():
            # Within a run, an id minus its place is constant.
            for _, run in groupby(enumerate(level), lambda placed: placed[1] - placed[0]):
                ids = [i for _, i in run]
                runs.append((ids[0], ids[-1], rank))
        return runs

    @property
    def state(self) -> CursorState:
        """The position, for a checkpoint."""
        return CursorState(epoch=self._epoch, position=self._position)

    def restore(self, state: CursorState) -> None:
        """Goes to position `state`; raises CheckpointError if this data set has no such position."""
        if not 0 <= state.position <= len(self._ids) or state.epoch < 0:
            raise CheckpointError(
                f"the checkpoint stands at prompt {state.position} of epoch {state.epoch}, but there are "
                f"{len(self._ids)} prompts; resume with the data files of the first run"
            )
        self._epoch, self._position = state.epoch, state.position
        self._order = self._epoch_order()

    def take(self, count: int) -> list[int]:
        """Returns the next batch of `count` ids; `count` must not exceed the number of ids."""
        if self._position + count > len(self._order):
            self._next_epoch()
        batch = self._order[self._position : self._position + count]
        self._position += count
        return batch

    def take_more(self, count: int, *, without: Collection[int]) -> list[int]:
        """Returns the next `count` ids that are not in `without`; fewer if there are no others.

        Several calls, each excluding the ids of earlier calls, return the same ids as a single call.

        Args:
            without: ids to skip, such as those of the step, which recur if an epoch ends within it.
        """
        taken: list[int] = []
        passed = set(without)
        while len(taken) < count and len(passed) < len(self._ids):
            if self._position == len(self._order):
                self._next_epoch()
            candidate = self._order[self._position]
            self._position += 1
            if candidate not in passed:
                passed.add(candidate)
                taken.append(candidate)
        return taken

    def _next_epoch(self) -> None:
        self._epoch, self._position = self._epoch + 1, 0
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        if not self._shuffle:
            return [i for level in self._levels.values() for i in level]
        key = [self._seed, self._epoch, *([self._stream] if self._stream else [])]
        generator = np.random.Generator(np.random.PCG64(key))
        return [level[i] for level in self._levels.values() for i in generator.permutation(len(level))]
