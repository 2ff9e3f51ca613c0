"""VALIDATE: gets answers to held-out prompts from the committed policy, and their scores."""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline.controller.batch.collect import Collector
from paceline.controller.batch.collected_batch import Batch
from paceline.controller.batch.dispatch import Order
from paceline.controller.batch.inputs import HeldOutPrompts, Inputs
from paceline.controller.phases import Phase
from paceline.controller.progress import Progress, Run
from paceline.controller.run.held_out import measured, order_of, record_order, sets_after
from paceline.controller.run.publication import Publication
from paceline.controller.run.records.checkpoints import ValidationResult
from paceline.core.errors import LostDataError
from paceline.core.policy import PolicyTag
from paceline.service.observability.telemetry import span

MAX_ATTEMPTS = 3
"""How often a validation may begin."""


class Validation:
    """Answers and scores a run's held-out prompts between two steps, on all servers.

    `ValidationBeside` does so while training goes on; methods that only it needs do nothing here.
    """

    def __init__(
        self, run: Run, progress: Progress, inputs: Inputs, collector: Collector, publication: Publication
    ) -> None:
        self._run, self._progress, self._inputs = run, progress, inputs
        self._collector, self._publication = collector, publication

    async def validate(self, policy: PolicyTag) -> dict[str, float]:
        """Returns the metrics of the validation that follows the step; {} if no validation follows."""
        step = self._progress.step
        sets = sets_after(self._run, self._inputs, step)
        if not sets:
            return {}
        began = time.monotonic()
        self._progress.move(Phase.VALIDATE)
        order = order_of(self._inputs, step, policy, sets)
        with span("validate"):
            batch = await self._answers(order, sets)
        metrics = await measured(self._run, self._collector, order, sets, batch)
        return {"timing_s/validate": time.monotonic() - began, **metrics}

    async def make_way(self, version: int) -> None:
        """Is called before the push of a version."""

    async def results(self, *, is_saved: bool = False) -> list[ValidationResult]:
        """Returns the results that came in since the last call; called at the end of a step.

        Args:
            is_saved: whether a checkpoint of the step is due.
        """
        return []

    async def clean_up(self) -> None:
        """Removes the data of the validations in `results` from the broker, after the step is finished."""

    async def go_on(self) -> None:
        """Goes on with validations of an earlier controller, or of this one before a loss."""
        for step in sorted(self._run.journal.standing.validations):
            if step <= self._run.journal.standing.finished:
                self._skip(
                    step, "it was begun by validation servers, and rollout.validation_servers is 0 now"
                )

    async def close(self) -> None:
        """Ends the validations under way."""

    def _skip(self, step: int, reason: str) -> None:
        self._run.journal.record("validation_skipped", step=step, reason=reason)
        self._run.events.notice(f"the validation of step {step} is left out: {reason}")

    async def _answers(self, order: Order, sets: Sequence[HeldOutPrompts]) -> Batch:
        attempt = 0
        while True:
            record_order(self._run, order, sets)
            try:
                await self._collector.dispatch(order)
                return await self._publication.to_newcomers(order.policy, self._collector.collect(order))
            except LostDataError as error:
                attempt += 1
                if attempt == MAX_ATTEMPTS:
                    raise
                self._run.events.notice(f"step {order.step}: the validation begins again: {error}")
                self._run.journal.record("lost", step=order.step, reason=str(error))
                await self._collector.begin_anew()
