"""Halves micro-batches and repeats the optimizer step when an update runs out of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from paceline.core.errors import EnvironmentLackError
from paceline.learner.batch.halve import Halves
from paceline.learner.batch.types import TrainingBatch
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.train.state.optimizer import OutOfMemoryError

T = TypeVar("T")


class MemoryRoom:
    """Limits the size of micro-batches in this process.

    After a repeated step, later steps are planned with the smaller token budget.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._num_halvings, self._num_planned = 0, 0
        self._num_retries = 0

    def budget(self, token_budget: int, longest: int) -> int:
        """Returns the token budget of the next step, at least `longest`."""
        self._num_planned, self._num_retries = self._num_halvings, 0
        return max(token_budget >> self._num_halvings, min(longest, token_budget))

    @property
    def metrics(self) -> dict[str, float]:
        """Returns `guard/out_of_memory`: the repeated optimizer steps of this training step, if any."""
        return {"guard/out_of_memory": float(self._num_retries)} if self._num_retries else {}

    def take(
        self,
        parts: list[TrainingBatch],
        act: Callable[[Sequence[TrainingBatch]], T],
        *,
        ranks: Ranks,
        network: str,
    ) -> T:
        """Takes an optimizer step on a mini-batch's parts; every rank calls it.

        Args:
            parts: this rank's parts; halves replace them in this list.
            act: takes the step; may raise OutOfMemoryError on every rank alike, with nothing changed.
            network: "actor" or "critic", for the message.

        Raises:
            EnvironmentLackError: a micro-batch of one row does not fit.
        """
        cut: list[Halves] = []
        while True:
            unscored = [part.log_probs for part in parts if "old" not in part.log_probs]
            try:
                result = act(parts)
                break
            except OutOfMemoryError as error:
                self._refuse_single_rows(parts, ranks, error)
                for log_probs in unscored:
                    log_probs.pop("old", None)
                latest = [Halves.of(part) for part in parts]
                cut += latest
                parts[:] = [half for halves in latest for half in halves.halves]
                self._note(network, error)
        for halves in reversed(cut):
            halves.hand_back()
        return result

    def _note(self, network: str, error: OutOfMemoryError) -> None:
        self._num_retries += 1
        self._num_halvings = max(self._num_halvings, self._num_planned + 1)
        self._notify(
            f"guard: out of memory in the {network}'s update on {error.num_ranks} rank(s); its micro-batches "
            "were halved and the optimizer step is taken again; until this process ends, steps are planned "
            f"with 1/{1 << self._num_halvings} of actor.ppo_max_token_len_per_gpu"
        )

    def _refuse_single_rows(
        self, parts: Sequence[TrainingBatch], ranks: Ranks, error: OutOfMemoryError
    ) -> None:
        most = max(len(part.batch.sources) for part in parts)
        if int(ranks.world.all_max(torch.tensor([float(most)], device=ranks.device)).item()) <= 1:
            raise EnvironmentLackError(
                f"{error}: already one row per micro-batch, which cannot be halved; set "
                "actor.memory.recompute: full, shorten data.max_response_length, or use more GPUs"
            ) from error
