"""VALIDATE: has held-out prompts answered with the committed policy, and scored."""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline.controller.batch.collect import Batch, Collector
from paceline.controller.batch.dispatch import Ask, Order
from paceline.controller.batch.inputs import HeldOutPrompts, Inputs
from paceline.controller.phases import Phase
from paceline.controller.progress import Progress, Run
from paceline.controller.run.publication import Publication
from paceline.controller.run.records import val_metrics
from paceline.controller.run.records.trajectories import save_trajectories
from paceline.core.errors import LostDataError
from paceline.core.evaluation import final_answer
from paceline.core.ids import Purpose, TrajectoryId
from paceline.core.policy import PolicyTag
from paceline.service.observability.telemetry import span
from paceline.service.threads import in_thread

_MAX_ATTEMPTS = 3
# Responses whose texts are in memory at once.
_PORTION = 256


class Validation:
    """Answers and scores a run's held-out prompts."""

    def __init__(
        self, run: Run, progress: Progress, inputs: Inputs, collector: Collector, publication: Publication
    ) -> None:
        self._run, self._progress, self._inputs = run, progress, inputs
        self._collector, self._publication = collector, publication

    async def validate(self, policy: PolicyTag) -> dict[str, float]:
        """Returns the metrics of the validation that follows the step; {} if no validation follows."""
        step = self._progress.step
        due = self._run.config.validated_after(step)
        sets = [held_out for held_out in self._inputs.val if held_out.of in due]
        if not sets:
            return {}
        began = time.monotonic()
        self._progress.move(Phase.VALIDATE)
        order = self._order(step, policy, sets)
        names = {i: held_out.of.name for held_out in sets for i in held_out.ids()}
        with span("validate"):
            batch = await self._answers(order, sets)
        await save_trajectories(self._run, "val", step, batch, order.prompts, self._collector, names)
        for group in batch.dropped:
            self._run.journal.record(
                "val_group_dropped",
                step=step,
                prompt=group.prompt_id,
                reason=group.reason,
                message=group.message,
            )
        finals = await self._finals(batch) if self._run.config.keeps_texts else {}
        return {
            "timing_s/validate": time.monotonic() - began,
            **await in_thread(val_metrics.of_sets, sets, batch, finals),
        }

    def _order(self, step: int, policy: PolicyTag, sets: Sequence[HeldOutPrompts]) -> Order:
        asks = {
            held_out.of.name: Ask(
                purpose=Purpose.VALIDATE,
                num_samples=held_out.of.n,
                sampling=self._inputs.held_out_sampling(held_out.of),
                val_set=held_out.of.name,
            )
            for held_out in sets
        }
        return Order(
            step=step,
            policy=policy,
            prompts={i: held_out.prompts.prompts[i] for held_out in sets for i in held_out.ids()},
            asks=(asks[sets[0].of.name],),
            prompt_asks={i: (asks[held_out.of.name],) for held_out in sets for i in held_out.ids()},
        )

    async def _finals(self, batch: Batch) -> dict[TrajectoryId, str]:
        """Returns the final answer in each response."""
        finals = {}
        for start in range(0, len(batch.samples), _PORTION):
            portion = batch.samples[start : start + _PORTION]
            for header, text in zip(portion, await self._collector.texts(portion), strict=True):
                finals[header.trajectory_id] = final_answer(text)
        return finals

    async def _answers(self, order: Order, sets: Sequence[HeldOutPrompts]) -> Batch:
        attempt = 0
        while True:
            self._run.journal.record(
                "validate",
                step=order.step,
                policy=str(order.policy),
                sets={
                    held_out.of.name: {
                        "prompts": held_out.ids(),
                        "num_samples": held_out.of.n,
                        "right_above": held_out.of.right_above,
                    }
                    for held_out in sets
                },
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
