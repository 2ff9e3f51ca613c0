"""Which chunks of a step the learner can work on while its barrier is still open. Pure.

A chunk is a run of prompts in batch order. It can be scored when its groups are complete and no group before
it has failed, because its rows then have their final places in the batch. Its gradient can be computed when
the gradients of all earlier chunks have been: sums depend on their order, scores do not.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from paceline.config.run import RunConfig
from paceline.controller.batch.barrier import Barrier


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedChunk:
    """A chunk to work on; `number` counts the step's chunks from 0."""

    number: int
    prompts: tuple[int, ...]
    with_gradient: bool


class ClosedChunks:
    """Gives each chunk of a step once for its scores and once for its gradient, if these are wanted.

    Args:
        width: prompts per chunk.
        num_gradients: number of chunks at the start of the step whose gradients are computed ahead.
        num_unscored: number of chunks at the start of the step that need no scores.
    """

    def __init__(
        self, prompts: Collection[int], *, width: int, num_gradients: int, num_unscored: int
    ) -> None:
        self.width, ordered = width, sorted(prompts)
        self._chunks = [tuple(ordered[first : first + width]) for first in range(0, len(ordered), width)]
        self._to_score = list(range(num_unscored, len(self._chunks)))
        self._num_gradients, self._next_gradient = num_gradients, 0

    @classmethod
    def of(cls, config: RunConfig, prompts: Collection[int]) -> ClosedChunks:
        """Makes the chunks for the configured `barrier.work_ahead`."""
        width = config.prompts_per_chunk
        first_mini_batch = config.actor.ppo_mini_batch_size // width
        takes_gradients = config.barrier.work_ahead == "gradients"
        return cls(
            prompts,
            width=width,
            # The learner reduces the gradient with the last chunk, which waits for the barrier.
            num_gradients=first_mini_batch - 1 if takes_gradients else 0,
            num_unscored=0 if config.scores_first_mini_batch else first_mini_batch,
        )

    def take(self, barrier: Barrier) -> ClosedChunk | None:
        """Returns the next chunk to work on; None if there is none now."""
        first_failed = min((group.prompt_id for group in barrier.dropped), default=None)

        def is_closed(number: int) -> bool:
            prompts = self._chunks[number]
            is_placed = first_failed is None or prompts[-1] < first_failed
            return is_placed and all(map(barrier.is_complete, prompts))

        if self._next_gradient < self._num_gradients and is_closed(self._next_gradient):
            number, self._next_gradient = self._next_gradient, self._next_gradient + 1
            if number in self._to_score:
                self._to_score.remove(number)
            return ClosedChunk(number=number, prompts=self._chunks[number], with_gradient=True)
        number = next(filter(is_closed, self._to_score), -1)
        if number < 0:
            return None
        self._to_score.remove(number)
        return ClosedChunk(number=number, prompts=self._chunks[number], with_gradient=False)
