"""Holds a rank's work ahead: chunks scored before their batch is complete, and the begun gradient.

Every rank keeps the same chunks, with its own micro-batches. This state never changes a step's result: it
looks up each of its chunks, and computes those that are missing or have different rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.guard import Adjustments
from paceline.core.policy import PolicyTag
from paceline.core.training import BatchRow
from paceline.learner.batch.planning.plan import Chunk
from paceline.learner.batch.types import ScoredBatch, TrainingBatch
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.networks import PolicyNetwork
from paceline.learner.train.state.optimizer import Trainable
from paceline.learner.train.stopwatch import Stopwatch

log = logging.getLogger(__name__)

_UPDATE = "timing_s/update_actor"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredChunk:
    """A chunk with this rank's scored micro-batches, in the plan's order."""

    chunk: Chunk
    parts: tuple[ScoredBatch, ...]


@dataclass(kw_only=True, slots=True, eq=False)
class BegunGradient:
    """Describes the gradient of a step's first chunks; the policy's parameters hold it.

    Attributes:
        adjustments: the guard's adjustments at the time.
        chunks: the chunks in order, from the step's first on.
        parts: this rank's micro-batches of the chunks.
    """

    adjustments: Adjustments
    chunks: list[ScoredChunk] = field(default_factory=list)
    parts: list[TrainingBatch] = field(default_factory=list)
    _sums: Tensor | None = None

    @property
    def next_row(self) -> int:
        """The place in the batch of the first row after the chunks."""
        return self.chunks[-1].chunk.rows[-1] + 1 if self.chunks else 0

    def add(self, chunk: ScoredChunk, parts: Sequence[TrainingBatch], sums: Tensor) -> None:
        """Records that a chunk's gradient was added, with the sums of its losses."""
        self.chunks.append(chunk)
        self.parts += parts
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self) -> tuple[int, Tensor | None]:
        """Returns the number of computed micro-batches, and their sums; a second call returns 0 and None."""
        number, sums = len(self.parts), self._sums
        self.parts, self._sums = [], None
        return number, sums


class WorkAhead:
    """The work ahead of one step.

    Args:
        ranks: the group; every rank must call methods that change the gradient.
    """

    def __init__(self, actor: Trainable[PolicyNetwork], ranks: Ranks) -> None:
        self._actor, self._ranks = actor, ranks
        self._step, self._policy = 0, PolicyTag(version=-1, digest="")
        self._chunks: dict[int, tuple[tuple[tuple[str, str], ...], ScoredChunk]] = {}
        self._gradient: BegunGradient | None = None
        self._is_refused = False
        self._seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}

    def turn_to(self, step: int, policy: PolicyTag) -> None:
        """Forgets everything that belongs to another step or policy."""
        if (step, policy) != (self._step, self._policy):
            self.forget()
            self._step, self._policy = step, policy

    def forget(self) -> None:
        """Forgets all work done ahead."""
        self.drop_gradient()
        self._chunks, self._seconds, self.peaks = {}, {}, {}
        self._step, self._is_refused = 0, False

    # --- scored chunks

    def find(self, chunk: Chunk, rows: Sequence[BatchRow]) -> ScoredChunk | None:
        """Returns a chunk if it was scored with these rows in these micro-batches."""
        identity, kept = self._chunks.get(chunk.rows[0], ((), None))
        return kept if kept and kept.chunk == chunk and identity == _identity(rows) else None

    def keep(self, chunk: ScoredChunk, rows: Sequence[BatchRow]) -> None:
        """Keeps a chunk that was scored."""
        self._chunks[chunk.chunk.rows[0]] = _identity(rows), chunk

    # --- the gradient

    def gradient_at(self, first_row: int, adjustments: Adjustments) -> BegunGradient | None:
        """Returns the gradient to add the chunk at this place to; None if the chunk is not next."""
        if self._is_refused:
            return None
        gradient = self._gradient or BegunGradient(adjustments=adjustments)
        if gradient.next_row != first_row or gradient.adjustments != adjustments:
            return None
        self._gradient = gradient
        return gradient

    def refuse_gradient(self) -> None:
        """Refuses gradients ahead for the rest of this step; the begun gradient is already gone."""
        self._gradient, self._is_refused = None, True

    def drop_gradient(self) -> None:
        """Drops the gradient that was begun."""
        gradient, self._gradient = self._gradient, None
        if gradient is not None and gradient.chunks:
            self._actor.drop_gradient(self._ranks)

    def begun(
        self, chunks: Sequence[ScoredChunk], parts: Sequence[TrainingBatch], adjustments: Adjustments
    ) -> BegunGradient | None:
        """Returns the gradient begun for a batch's first mini-batch, if the loss still reads the same values.

        Args:
            parts: this rank's micro-batches of the mini-batch.
        """
        gradient = self._gradient
        if gradient is None or not gradient.chunks:
            return None
        fits = (
            gradient.adjustments == adjustments
            and len(gradient.chunks) < len(chunks)
            and all(ours is theirs for ours, theirs in zip(gradient.chunks, chunks, strict=False))
            and all(
                torch.equal(ours.advantages, theirs.advantages) and torch.equal(ours.scores, theirs.scores)
                for ours, theirs in zip(gradient.parts, parts, strict=False)
            )
        )
        if self._ranks.world.all_max(torch.tensor([0.0 if fits else 1.0], device=self._ranks.device)).item():
            log.warning(
                "step %d: the gradient begun ahead used other samples, rewards or adjustments than the step "
                "has; it is computed again",
                self._step,
            )
            self.drop_gradient()
        return self._gradient

    def finish(self) -> None:
        """Ends the use of the gradient."""
        self._gradient = None
        self.forget()

    # --- times and memory

    def note(self, stopwatch: Stopwatch, seconds: float) -> None:
        """Records the seconds of work ahead, and its phases' times and memory."""
        for name, more in {"": seconds, **stopwatch.seconds}.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + more
        for name, peak in stopwatch.peaks.items():
            self.peaks[name] = max(peak, self.peaks.get(name, 0))

    @property
    def update_s(self) -> float:
        """Seconds that the begun gradient took."""
        return self._seconds.get(_UPDATE, 0.0)

    def metrics(self, chunks: Sequence[ScoredChunk]) -> dict[str, float]:
        """Returns `ahead/*` and `timing_s/ahead` of a step with these chunks."""
        kept = {id(chunk) for _, chunk in self._chunks.values()}
        gradient = {id(chunk) for chunk in self._gradient.chunks} if self._gradient else set()
        num_rows = sum(len(chunk.chunk.rows) for chunk in chunks)

        def share(of: set[int]) -> float:
            return sum(len(chunk.chunk.rows) for chunk in chunks if id(chunk) in of) / num_rows

        return {
            "ahead/scored_share": share(kept),
            "ahead/gradient_share": share(gradient),
            "timing_s/ahead": self._seconds.get("", 0.0),
        }


def _identity(rows: Sequence[BatchRow]) -> tuple[tuple[str, str], ...]:
    """Returns the parts of rows on which scores depend, which excludes rewards."""
    return tuple((str(row.trajectory_id), row.blob_digest) for row in rows)
