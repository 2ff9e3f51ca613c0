"""Samples later steps while the learner trains a step (`barrier.mode`: bounded).

consumes     prompt ids of the cursor, scored headers
waits for    each step's barrier to close, one step after the other, with a collection's deadlines
produces     batches of later steps; each batch has samples of a single version

With a bound of k, step s is sampled from version s - 1 - k, the newest one with which learner and servers can
work at the same time. If no step was dispatched ahead before (at the start, after a checkpoint), the next
k + 1 steps are all sampled from the version that is committed then. Neither rule depends on the speed of
learner or servers. The weights of step s are pushed when the steps up to s + k are collected, so that no
sample is begun from one version and ended from another.

Nothing is dispatched ahead of a checkpoint by trainer.save_freq, so that a run which resumes from it draws
the same samples.

With `rollout.in_flight` a push does not wait for unfinished samples: the prompts of step s + k are sent out
when step s begins, to be sampled from version s - 1 or newer ones, and each step is collected when it begins.

docs/decisions/0036-bounded-staleness.md
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.config.run import RunConfig
from paceline.controller.batch.collect import Collector
from paceline.controller.batch.collected_batch import Batch
from paceline.controller.batch.dispatch import Order
from paceline.controller.batch.inputs import Inputs
from paceline.controller.batch.training_batch import TrainingBatches
from paceline.controller.phases import Phase
from paceline.controller.progress import Progress, Run
from paceline.controller.run.publication import Publication
from paceline.controller.standing import StepInProgress
from paceline.core.errors import LostDataError
from paceline.core.policy import PolicyTag
from paceline.data.mixture import MixtureState
from paceline.data.prompts import Prompt
from paceline.service.tasks import cancel


def steps_ahead(config: RunConfig, step: int) -> Iterator[int]:
    """Yields the steps that are to be dispatched when `step` is trained, ascending."""
    for later in range(step + 1, step + config.barrier.bound + 1):
        if config.trainer.saves_after(later - 1):  # also after the last step
            return
        yield later


@dataclass(kw_only=True, slots=True)
class _Drawn:
    """A step whose prompts are drawn.

    Attributes:
        before: the cursor's position before the draw.
        dispatched: the journal's record of the dispatch of `batch`.
        began: the position in the log at which the collection began.
    """

    prompts: dict[int, Prompt]
    before: MixtureState
    dispatched: StepInProgress | None = None
    batch: Batch | None = None
    began: str = ""


class Lookahead:
    """Draws the prompts of each step, and samples later steps while the learner trains."""

    def __init__(
        self,
        run: Run,
        progress: Progress,
        *,
        inputs: Inputs,
        batches: TrainingBatches,
        collector: Collector,
        publication: Publication,
    ) -> None:
        self._config, self._journal, self._events = run.config, run.journal, run.events
        self._progress, self._inputs, self._batches = progress, inputs, batches
        self._collector, self._publication = collector, publication
        self._drawn: dict[int, _Drawn] = {}
        self._task: asyncio.Task[None] | None = None

    # --- prompts

    def draw(self, step: int) -> dict[int, Prompt]:
        """Returns the prompts of a step by id, ascending; steps are drawn in order, each once."""
        if step not in self._drawn:
            inputs, before = self._inputs, self._inputs.cursor.state
            prompts = {i: inputs.train.prompts[i] for i in sorted(inputs.cursor.take(step))}
            self._drawn[step] = _Drawn(prompts=prompts, before=before)
        return self._drawn[step].prompts

    def cursor_after(self, step: int) -> MixtureState:
        """Returns the cursor's position after the prompts of a step."""
        later = self._drawn.get(step + 1)
        return self._inputs.cursor.state if later is None else later.before

    def log_position_after(self, step: int) -> str:
        """Returns the position from which the log is read once the step is finished."""
        later = self._known(step + 1)
        return self._collector.finished_position if later is None else later.began

    def go_to(self, cursor: MixtureState) -> None:
        """Forgets all steps, and sets the cursor to the position where the next step draws its prompts."""
        self._inputs.cursor.restore(cursor)
        self._drawn.clear()

    def finish(self, step: int) -> None:
        """Forgets the prompts and the batch of a step that is finished."""
        self._drawn.pop(step, None)

    # --- a step

    def policy(self, step: int, committed: PolicyTag) -> PolicyTag:
        """Returns the policy that a step samples from."""
        dispatched = self._journal.standing.dispatched(step)
        is_older = dispatched is not None and dispatched.policy not in ("", str(committed))
        return PolicyTag.parse(dispatched.policy) if dispatched is not None and is_older else committed

    def batch(self, step: int) -> Batch | None:
        """Returns the batch of a step that was collected ahead, so that the step need not wait for it."""
        known = self._known(step)
        return None if known is None else known.batch

    def _known(self, step: int) -> _Drawn | None:
        """Returns the step if its batch is collected and its trajectories are not void."""
        drawn = self._drawn.get(step)
        if drawn is None or drawn.batch is None:
            return None
        return drawn if drawn.dispatched is self._journal.standing.dispatched(step) else None

    # --- ahead of the learner

    def begin(self, step: int, policy: PolicyTag) -> None:
        """Samples later steps in a task, from the committed policy, while `step` is trained."""
        if self._config.barrier.bound and not self._config.pushes_in_flight:
            self._task = asyncio.create_task(self._sample(step, policy), name=f"ahead of step {step}")

    async def send(self, step: int, policy: PolicyTag) -> None:
        """Sends out the prompts of the steps after `step`, to be sampled from `policy` or newer ones."""
        if not self._config.pushes_in_flight:
            return
        for later in steps_ahead(self._config, step):
            if self._journal.standing.dispatched(later) is None and self._progress.stop_reason:
                return
            order = self._order(later, policy)
            self._batches.record_dispatch(order, order.prompts, order.counts)
            await self._collector.dispatch(order)

    def _order(self, step: int, policy: PolicyTag) -> Order:
        return Order(
            step=step, policy=self.policy(step, policy), prompts=self.draw(step), asks=self._batches.asks
        )

    async def settle(self) -> float:
        """Waits for the task of `begin`; returns the seconds.

        Raises:
            PacelineError: a later step cannot be collected.
        """
        began, task = time.monotonic(), self._task
        if task is not None:
            if not task.done():
                self._progress.move(Phase.COLLECT)
            await task
            self._task = None
        return time.monotonic() - began

    async def cancel(self) -> None:
        """Ends the task of `begin`; steps that are not collected stay dispatched."""
        task, self._task = self._task, None
        if task is not None:
            await cancel(task)

    async def withdraw(self, step: int, reason: str) -> None:
        """Makes all samples for the steps after `step` void."""
        await self.cancel()
        self._withdraw_after(step, reason)

    def _withdraw_after(self, step: int, reason: str) -> None:
        for later in self._journal.standing.dispatched_after(step):
            self._journal.record("withdrawn", step=later, reason=reason)
            self._events.notice(f"step {later}: what was sampled ahead is void: {reason}")

    async def _sample(self, step: int, policy: PolicyTag) -> None:
        for later in steps_ahead(self._config, step):
            if self._known(later) is not None:
                continue
            dispatched = self._journal.standing.dispatched(later)
            # The run ends after `step`, or `step` was committed before a restart and newer weights are there.
            if dispatched is None and (self._progress.stop_reason or step in self._journal.standing.commits):
                return
            try:
                await self._collect(self._order(later, policy), policy)
            except LostDataError as error:
                self._withdraw_after(later - 1, str(error))
                return

    async def _collect(self, order: Order, policy: PolicyTag) -> None:
        drawn, collector = self._drawn[order.step], self._collector
        if order.policy == policy:
            self._batches.record_dispatch(order, order.prompts, order.counts)
            await collector.dispatch(order)

        def is_over() -> bool:
            return order.policy != policy or not self._publication.is_served(policy)

        drawn.began = collector.position
        batch = await collector.collect(order, is_over=is_over, ahead=True)
        # The step that trains this batch does not wait for it.
        drawn.batch = replace(batch, gen_s=0.0, reward_s=0.0)
        drawn.dispatched = self._journal.standing.dispatched(order.step)
