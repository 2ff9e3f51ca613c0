"""Which prompts come next: a deterministic walk over shuffled prompt ids that can be saved and resumed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.errors import CheckpointError, DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class CursorState:
    """The position of the walk: the epoch, and the prompts taken of it."""

    epoch: int
    position: int


class PromptCursor:
    """Yields batches of distinct prompt ids; an epoch visits each id once, in an order from (seed, epoch).

    Ids left over at the end of an epoch that do not fill a batch are skipped, so that no id appears twice in
    a batch.

    Args:
        ids: the prompt ids, in any order.
        batch_size: ids per batch.
        seed: of the order.
        shuffle: False walks in ascending order.

    Raises:
        DataError: there are fewer ids than one batch needs.
    """

    def __init__(self, ids: Sequence[int], *, batch_size: int, seed: int, shuffle: bool = True) -> None:
        self._ids = sorted(ids)
        if len(self._ids) < batch_size:
            raise DataError(
                f"{len(self._ids)} usable prompts cannot fill data.train_batch_size={batch_size}; "
                "lower it or add prompts"
            )
        self._batch_size, self._seed, self._shuffle = batch_size, seed, shuffle
        self._epoch, self._position = 0, 0
        self._order = self._epoch_order()

    @property
    def state(self) -> CursorState:
        """The position, for a checkpoint."""
        return CursorState(epoch=self._epoch, position=self._position)

    def restore(self, state: CursorState) -> None:
        """Goes to the position `state`; raises CheckpointError where this data set has no such position."""
        if not 0 <= state.position <= len(self._ids) or state.epoch < 0:
            raise CheckpointError(
                f"the checkpoint stands at prompt {state.position} of epoch {state.epoch}, but there are "
                f"{len(self._ids)} prompts; resume with the data files of the first run"
            )
        self._epoch, self._position = state.epoch, state.position
        self._order = self._epoch_order()

    def take(self) -> list[int]:
        """The next batch of ids."""
        if self._position + self._batch_size > len(self._order):
            self._next_epoch()
        batch = self._order[self._position : self._position + self._batch_size]
        self._position += self._batch_size
        return batch

    def take_more(self, count: int, *, without: Collection[int]) -> list[int]:
        """The next `count` ids of the walk that are not in `without`; fewer where there are no others.

        Several calls return the same ids as a single call for all of them.

        Args:
            without: ids to skip, say those of the step: they come up again if an epoch ends within it.
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
            return self._ids
        generator = np.random.Generator(np.random.PCG64([self._seed, self._epoch]))
        return [self._ids[i] for i in generator.permutation(len(self._ids))]
