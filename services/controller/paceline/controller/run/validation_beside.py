"""Validates versions on servers of their own while later steps are trained (`rollout.validation_servers`).

    COMMIT k -> val_prompts:vk -> (steps k + 1, k + 2, ... are trained) -> val_scored:vk -> line of step k

consumes     held-out prompts, scored headers of val_scored:vk
waits for    the answers, with the deadlines of a collection; with no server at version k, for `make_way`
             or the end of the step
unblocked by log entries, a change in the fleet
produces     metrics of step k, at the end of the step in which they came in

A validation server keeps version k until the validation is over: it takes no part in pushes before. The run
waits for a validation under way before it pushes the next version that is validated, before a checkpoint of
a later step, and in the last step. So one validation is under way at a time, and a run that resumes from a
checkpoint lacks no validation but that of the checkpoint's own step, which it can make again.

If no validation server has version k any more, the other servers answer the rest before they get the next
version; if these have it already, the validation is left out, with a line in the journal.

docs/decisions/0039-validation-beside-training.md
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from paceline.broker.log import LOG_START
from paceline.controller.batch.barrier import Barrier
from paceline.controller.batch.collect import Collector
from paceline.controller.batch.collected_batch import Batch
from paceline.controller.batch.dispatch import Order
from paceline.controller.batch.inputs import HeldOutPrompts, Inputs
from paceline.controller.fleet.supervisor import Supervisor
from paceline.controller.phases import Phase
from paceline.controller.progress import Progress, Run
from paceline.controller.run.held_out import measured, order_of, record_order, sets_after
from paceline.controller.run.publication import Publication
from paceline.controller.run.records.checkpoints import ValidationResult
from paceline.controller.run.validation import MAX_ATTEMPTS, Validation
from paceline.core.errors import LostDataError
from paceline.core.policy import PolicyTag
from paceline.data.prompts import Prompt
from paceline.service.observability.telemetry import span
from paceline.service.tasks import cancel

_LOOK_S, _PAUSE_S = 0.2, 2.0
# What an earlier controller has collected is read again within this time.
_READ_AGAIN_S = 10.0

CollectorOf = Callable[[int, Callable[[], Awaitable[None]]], Collector]
"""Makes the collector of a version's validation; the function waits for the services that it needs."""


@dataclass(eq=False, kw_only=True, slots=True)
class _UnderWay:
    """A validation that has begun.

    Attributes:
        barrier: the barrier of its collection; None until an answer has come in.
        is_lent: whether the servers that answer training prompts also answer the rest of this validation.
    """

    order: Order
    sets: Sequence[HeldOutPrompts]
    collector: Collector
    began: float = field(default_factory=time.monotonic)
    task: asyncio.Task[ValidationResult]
    barrier: Barrier | None = None
    is_lent: bool = False

    @property
    def rest(self) -> Order:
        """The order for the answers that have not come in."""
        missing = None if self.barrier is None else set(self.barrier.missing)
        prompts = self.order.prompts.items()
        return replace(self.order, prompts={i: p for i, p in prompts if missing is None or i in missing})

    def watch(self, barrier: Barrier) -> None:
        self.barrier = barrier


class ValidationBeside(Validation):
    """Answers and scores a run's held-out prompts on validation servers."""

    def __init__(
        self,
        run: Run,
        progress: Progress,
        inputs: Inputs,
        collector_of: CollectorOf,
        publication: Publication,
        supervisor: Supervisor,
    ) -> None:
        self._run, self._progress, self._inputs = run, progress, inputs
        self._collector_of, self._publication, self._supervisor = collector_of, publication, supervisor
        self._current: _UnderWay | None = None
        self._over: list[_UnderWay] = []
        self._ended: list[_UnderWay] = []
        under_way = run.journal.standing.validations
        if under_way:
            # Servers that outlived an earlier controller keep their weights.
            publication.validated = PolicyTag.parse(under_way[max(under_way)])

    async def validate(self, policy: PolicyTag) -> dict[str, float]:
        """Begins the validation that follows the step, if there is one; returns no metrics."""
        step = self._progress.step
        sets = sets_after(self._run, self._inputs, step)
        if sets and (self._current is None or self._current.order.step != step):
            await self._begin(step, policy, sets)
        return {}

    async def make_way(self, version: int) -> None:
        """Waits for the validation under way if the push of a version would end it, or a new one follows."""
        current = self._current
        if current is None or current.order.step >= version:
            return
        if not current.task.done() and not self._is_answered(current):
            await self._without_servers(current)
        must_wait = current.is_lent or bool(sets_after(self._run, self._inputs, version))
        if self._current is current and must_wait:
            await self._wait(current)

    async def results(self, *, is_saved: bool = False) -> list[ValidationResult]:
        """Returns the results that came in since the last call; called at the end of a step.

        Args:
            is_saved: whether a checkpoint of the step is due, which waits for validations of earlier steps.
        """
        step, current = self._progress.step, self._current
        is_last = step == self._run.config.trainer.num_steps
        if current is not None and (is_last or (is_saved and current.order.step < step)):
            await self._wait(current, is_last=is_last)
        ended, self._over = self._over, []
        if self._current is not None and self._current.task.done():
            ended.append(self._current)
            self._current = None
        results = [under_way.task.result() for under_way in ended]
        self._ended += ended
        return results

    async def clean_up(self) -> None:
        """Removes the data of the validations in `results` from the broker, after the step is finished."""
        ended, self._ended = self._ended, []
        for under_way in ended:
            await under_way.collector.mailboxes.purge()

    async def go_on(self) -> None:
        """Goes on with validations of an earlier controller, or of this one before a loss."""
        standing = self._run.journal.standing
        kept: dict[int, _UnderWay] = {}
        for under_way in self._all:
            has_failed = under_way.task.done() and under_way.task.exception() is not None
            if has_failed or standing.validations.get(under_way.order.step) != str(under_way.order.policy):
                await cancel(under_way.task)
            else:
                kept[under_way.order.step] = under_way
        self._ended, self._over, self._current = [], [], None
        self._publication.validated = None
        for step, policy in sorted(standing.validations.items()):
            if step in kept:
                self._advance(kept[step])
                continue
            tag, publication = PolicyTag.parse(policy), self._publication
            is_there = publication.is_held_for_validation(tag) or publication.is_served(tag)
            if step <= standing.finished or is_there:
                await self._begin(step, tag, sets_after(self._run, self._inputs, step))
        # Servers have one version each: the others must have been answered before.
        for under_way in [of for of in self._over if not of.task.done()]:
            await asyncio.wait([under_way.task], timeout=_READ_AGAIN_S)
            if not under_way.task.done():
                await self._give_up(under_way, "not all answers had come in, and the servers have gone on")

    async def close(self) -> None:
        """Ends the validations under way; another controller can go on with them."""
        for under_way in self._all:
            await cancel(under_way.task)

    @property
    def _all(self) -> list[_UnderWay]:
        return [*self._over, *([] if self._current is None else [self._current])]

    # --- one validation

    async def _begin(self, step: int, policy: PolicyTag, sets: Sequence[HeldOutPrompts]) -> None:
        order = order_of(self._inputs, step, policy, sets)
        record_order(self._run, order, sets, beside=True)

        async def services() -> None:
            await self._supervisor.reward_ready(self._run.config.service.recovery_timeout_s)
            # The sequencer decides, within a step, how to go on without servers. The collection's clocks
            # stand still meanwhile, and it goes on reading the answers that have come.
            if not self._is_answered(under_way):
                await asyncio.sleep(_PAUSE_S)

        async def answered() -> ValidationResult:
            return await self._answered(under_way)

        under_way = _UnderWay(
            order=order,
            sets=sets,
            collector=self._collector_of(policy.version, services),
            task=asyncio.create_task(answered(), name=f"validation of step {step}"),
        )
        self._advance(under_way)

    def _advance(self, under_way: _UnderWay) -> None:
        """Makes a validation the one under way; the one before is over."""
        if self._current is not None:
            self._over.append(self._current)
        self._current = under_way
        self._publication.validated = None if under_way.task.done() else under_way.order.policy

    async def _answered(self, under_way: _UnderWay) -> ValidationResult:
        with span("validate", attributes={"paceline.version": under_way.order.policy.version}):
            batch = await self._batch(under_way)
        if self._publication.validated == under_way.order.policy:
            self._publication.validated = None
        order, collector = under_way.order, under_way.collector
        metrics = await measured(self._run, collector, order, under_way.sets, batch)
        seconds = {"timing_s/validate": time.monotonic() - under_way.began}
        return ValidationResult(step=order.step, policy=str(order.policy), metrics=seconds | metrics)

    async def _batch(self, under_way: _UnderWay) -> Batch:
        order, collector, attempt = under_way.order, under_way.collector, 0
        await collector.recall(LOG_START, order.policy.version)
        while True:
            try:
                await self._dispatch(under_way)
                return await collector.collect(order, watch=under_way.watch)
            except LostDataError as error:
                attempt += 1
                if attempt == MAX_ATTEMPTS:
                    raise
                self._run.events.notice(f"the validation of step {order.step} begins again: {error}")
                under_way.barrier, under_way.is_lent = None, False
                await collector.begin_anew()
                record_order(self._run, order, under_way.sets, beside=True)

    async def _dispatch(self, under_way: _UnderWay) -> None:
        """Sends the prompts out; after the last step, when nothing is trained, to all servers."""
        order, collector = under_way.order, under_way.collector
        if order.step < self._run.config.trainer.num_steps:
            await collector.dispatch(order)
            return
        own, others = len(self._supervisor.validators), len(self._supervisor.rollouts)
        shares: tuple[dict[int, Prompt], dict[int, Prompt]] = {}, {}
        for place, (prompt_id, prompt) in enumerate(order.prompts.items()):
            shares[place % max(1, own + others) >= own][prompt_id] = prompt
        await collector.dispatch(replace(order, prompts=shares[0]))
        await collector.dispatcher.lend(replace(order, prompts=shares[1]))

    # --- waiting, and servers that are gone

    def _is_answered(self, under_way: _UnderWay) -> bool:
        """Returns whether there is a server that answers the validation's prompts."""
        publication, policy = self._publication, under_way.order.policy
        return publication.is_held_for_validation(policy) or (
            under_way.is_lent and publication.is_served(policy)
        )

    async def _wait(self, under_way: _UnderWay, *, is_last: bool = False) -> None:
        """Waits until the validation is over or given up.

        Args:
            is_last: whether the learner has its version, and can push it to servers that come back.
        """
        if under_way.task.done():
            under_way.task.result()
            return
        self._progress.move(Phase.VALIDATE)
        if is_last and under_way.order.policy == self._progress.policy:
            patience_s = self._run.config.service.recovery_timeout_s
            waiting = self._until_over(under_way, patience_s)
            await self._publication.to_newcomers(under_way.order.policy, waiting)
        else:
            await self._until_over(under_way, 0.0)

    async def _until_over(self, under_way: _UnderWay, patience_s: float) -> None:
        answered_at = time.monotonic()
        while not under_way.task.done():
            await asyncio.wait([under_way.task], timeout=_LOOK_S)
            now = time.monotonic()
            if self._is_answered(under_way):
                answered_at = now
            elif not under_way.task.done() and (
                self._publication.is_served(under_way.order.policy) or now - answered_at >= patience_s
            ):
                await self._without_servers(under_way)
                if self._current is not under_way:
                    return
        under_way.task.result()

    async def _without_servers(self, under_way: _UnderWay) -> None:
        """Makes other servers answer the rest if they have the version; else gives the validation up."""
        if not self._publication.is_served(under_way.order.policy):
            # The last answers may be on their way to be scored.
            await asyncio.wait([under_way.task], timeout=_READ_AGAIN_S)
            if under_way.task.done():
                return
            await self._give_up(under_way, f"no server has {under_way.order.policy} any more")
            return
        rest = under_way.rest
        self._run.events.notice(
            f"no validation server has {rest.policy}: the other servers answer the {len(rest.prompts)} "
            f"prompts that are left of the validation of step {rest.step}"
        )
        under_way.is_lent = True
        await under_way.collector.dispatcher.lend(rest)

    async def _give_up(self, under_way: _UnderWay, reason: str) -> None:
        await cancel(under_way.task)
        self._over = [other for other in self._over if other is not under_way]
        if self._current is under_way:
            self._current, self._publication.validated = None, None
        self._skip(under_way.order.step, reason)
        await under_way.collector.mailboxes.purge()
