"""Gives the learner closed chunks of a step while the others are collected (`barrier.work_ahead`).

consumes     groups that the barrier has admitted
waits for    a chunk to close; the learner to finish the chunk before
produces     nothing that the run depends on: TrainStep computes everything that was not done ahead

docs/decisions/0024-work-ahead-of-the-barrier.md
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from paceline.controller.batch.barrier import Barrier
from paceline.controller.batch.closed_chunks import ClosedChunk, ClosedChunks
from paceline.controller.batch.collect import Watch
from paceline.controller.batch.dispatch import Order
from paceline.controller.batch.training_rows import group_rows
from paceline.controller.fleet.clients import LearnerClient
from paceline.controller.fleet.membership import Member
from paceline.controller.progress import Run
from paceline.core.errors import PacelineError
from paceline.core.guard import Adjustments
from paceline.core.training import ChunkOrder
from paceline.service.observability.telemetry import span

log = logging.getLogger(__name__)


class WorkAheadDriver:
    """Sends work ahead, step by step.

    Args:
        member: returns the learner; raises PeerLostError if it is lost.
    """

    def __init__(self, run: Run, learner: LearnerClient, member: Callable[[], Member]) -> None:
        self._config, self._learner, self._member = run.config, learner, member

    @contextlib.asynccontextmanager
    async def during(self, order: Order, adjustments: Adjustments) -> AsyncIterator[Watch | None]:
        """Yields a watch for the block's collection to call; at the end waits for the chunk in progress."""
        if self._config.barrier.work_ahead == "off":
            yield None
            return
        shift = _Shift(order, adjustments, ClosedChunks.of(self._config, order.prompts), self._send)
        task = asyncio.create_task(shift.run(), name=f"work ahead of step {order.step}")
        try:
            yield shift.watch
            shift.end()
            await task
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _send(self, order: ChunkOrder) -> None:
        with span("work_ahead", attributes={"paceline.first_row": order.first_row}):
            await self._learner.work_ahead(self._member(), order)


class _Shift:
    """The work during one collection: `watch` wakes `run`, which sends one chunk at a time."""

    def __init__(
        self,
        order: Order,
        adjustments: Adjustments,
        chunks: ClosedChunks,
        send: Callable[[ChunkOrder], Awaitable[None]],
    ) -> None:
        self._order, self._adjustments, self._chunks, self._send = order, adjustments, chunks, send
        self._changed = asyncio.Event()
        self._barrier: Barrier | None = None
        self._is_over = False

    def watch(self, barrier: Barrier) -> None:
        self._barrier = barrier
        self._changed.set()

    def end(self) -> None:
        """Stops sending chunks, because the barrier has closed."""
        self._is_over = True
        self._changed.set()

    async def run(self) -> None:
        """Sends chunks until the end; an error ends only the work ahead, since the step meets it again."""
        try:
            while not self._is_over:
                chunk = None if self._barrier is None else self._chunks.take(self._barrier)
                if chunk is None:
                    self._changed.clear()
                    await self._changed.wait()
                else:
                    assert self._barrier is not None
                    await self._send(self._chunk_order(chunk, self._barrier))
        except PacelineError as error:
            log.warning("step %d: no more work ahead of the barrier: %s", self._order.step, error)

    def _chunk_order(self, chunk: ClosedChunk, barrier: Barrier) -> ChunkOrder:
        groups = [barrier.group(prompt_id) for prompt_id in chunk.prompts]
        # Rewards that are normalized over the batch, and thus advantages, are not known yet.
        is_final = not any(header.normalized for group in groups for header in group)
        return ChunkOrder(
            step=self._order.step,
            policy=self._order.policy,
            first_row=chunk.number * self._chunks.width * self._order.asks[0].num_samples,
            rows=tuple(row for group in groups for row in group_rows(group)),
            with_gradient=chunk.with_gradient and is_final,
            adjustments=self._adjustments,
        )
