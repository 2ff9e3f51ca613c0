"""The requests of a validation, and the metrics of the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.controller.batch.collect import Collector
from paceline.controller.batch.collected_batch import Batch
from paceline.controller.batch.dispatch import Ask, Order
from paceline.controller.batch.inputs import HeldOutPrompts, Inputs
from paceline.controller.progress import Run
from paceline.controller.run.records import val_metrics
from paceline.controller.run.records.trajectories import save_trajectories
from paceline.core.ids import Purpose, TrajectoryId
from paceline.core.policy import PolicyTag
from paceline.core.samples.evaluation import final_answer
from paceline.service.threads import in_thread

# Responses whose texts are in memory at once.
_PORTION = 256


def sets_after(run: Run, inputs: Inputs, step: int) -> list[HeldOutPrompts]:
    """Returns the sets that take part in the validation after a step; [] if none follows."""
    due = run.config.validated_after(step)
    return [held_out for held_out in inputs.val if held_out.of in due]


def order_of(inputs: Inputs, step: int, policy: PolicyTag, sets: Sequence[HeldOutPrompts]) -> Order:
    """Returns the order for the answers of these sets, with the weights after a step."""
    asks = {
        held_out.of.name: Ask(
            purpose=Purpose.VALIDATE,
            num_samples=held_out.of.n,
            sampling=inputs.held_out_sampling(held_out.of),
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


def record_order(run: Run, order: Order, sets: Sequence[HeldOutPrompts], **marks: bool) -> None:
    """Journals the request of a validation, each time that it begins."""
    run.journal.record(
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
        **marks,
    )


async def measured(
    run: Run, collector: Collector, order: Order, sets: Sequence[HeldOutPrompts], batch: Batch
) -> dict[str, float]:
    """Saves the answers, journals prompts without answers, and returns the metrics of all sets."""
    names = {i: held_out.of.name for held_out in sets for i in held_out.ids()}
    await save_trajectories(run, "val", order.step, batch, order.prompts, collector.mailboxes, names)
    for group in batch.dropped:
        run.journal.record("val_group_dropped", step=order.step, **group.fields)
    finals = await _finals(collector, batch) if run.config.keeps_texts else {}
    return await in_thread(val_metrics.of_sets, sets, batch, finals)


async def _finals(collector: Collector, batch: Batch) -> Mapping[TrajectoryId, str]:
    """Returns the final answer in each response."""
    finals = {}
    for start in range(0, len(batch.samples), _PORTION):
        portion = batch.samples[start : start + _PORTION]
        for header, text in zip(portion, await collector.mailboxes.texts(portion), strict=True):
            finals[header.trajectory_id] = final_answer(text)
    return finals
