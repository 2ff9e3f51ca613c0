"""VALIDATE: held-out prompts are answered and scored with the committed policy."""

from __future__ import annotations

import time

from paceline.controller.batch.collect import Batch, Collector
from paceline.controller.batch.dispatch import Ask, Order
from paceline.controller.batch.inputs import Inputs
from paceline.controller.phases import Phase
from paceline.controller.progress import Progress, Run
from paceline.controller.run.publication import Publication
from paceline.controller.run.records import metrics
from paceline.controller.run.records.trajectories import save_trajectories
from paceline.core.errors import LostDataError
from paceline.core.ids import Purpose
from paceline.core.policy import PolicyTag
from paceline.service.observability.telemetry import span

_MAX_ATTEMPTS = 3


class Validation:
    """Answers and scores a run's held-out prompts."""

    def __init__(
        self, run: Run, progress: Progress, inputs: Inputs, collector: Collector, publication: Publication
    ) -> None:
        self._run, self._progress, self._inputs = run, progress, inputs
        self._collector, self._publication = collector, publication

    async def validate(self, policy: PolicyTag) -> dict[str, float]:
        """Returns the metrics of a validation, {} without held-out prompts."""
        if self._inputs.val is None:
            return {}
        began, step = time.monotonic(), self._progress.step
        self._progress.move(Phase.VALIDATE)
        val, config = self._run.config.rollout.val, self._run.config
        ids = self._inputs.val.ids()[: config.data.val_max_prompts]
        sampling = self._inputs.sampling(config, val.temperature)
        order = Order(
            step=step,
            policy=policy,
            prompts={i: self._inputs.val.prompts[i] for i in ids},
            asks=(Ask(purpose=Purpose.VALIDATE, num_samples=val.n, sampling=sampling),),
        )
        with span("validate"):
            batch = await self._answers(order)
        await save_trajectories(self._run, "val", step, batch, self._inputs.val.prompts, self._collector)
        for group in batch.dropped:
            self._run.journal.record(
                "val_group_dropped",
                step=step,
                prompt=group.prompt_id,
                reason=group.reason,
                message=group.message,
            )
        return metrics.validation(batch, seconds=time.monotonic() - began)

    async def _answers(self, order: Order) -> Batch:
        attempt = 0
        while True:
            self._run.journal.record(
                "validate",
                step=order.step,
                policy=str(order.policy),
                prompts=list(order.prompts),
                num_samples=order.asks[0].num_samples,
            )
            try:
                await self._collector.dispatch(order)
                return await self._publication.to_newcomers(order.policy, self._collector.collect(order))
            except LostDataError as error:
                attempt += 1
                if attempt == _MAX_ATTEMPTS:
                    raise
                self._run.events.notice(f"step {order.step}: the validation begins again: {error}")
                self._run.journal.record("lost", step=order.step, reason=str(error))
                await self._collector.begin_anew()
