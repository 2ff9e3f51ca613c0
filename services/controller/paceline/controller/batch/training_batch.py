"""The batch of a training step: which prompts it asks for, whether enough came back, rows for the learner.

cursor -> plan -> (DISPATCH, COLLECT with refills) -> check -> rows
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.controller.batch.collect import Batch
from paceline.controller.batch.dispatch import Ask, Order
from paceline.controller.batch.inputs import Inputs
from paceline.controller.batch.refill import Refill
from paceline.controller.progress import Run
from paceline.core.errors import DataError, RewardError, RewardErrorKind
from paceline.core.ids import Purpose
from paceline.core.policy import PolicyTag
from paceline.core.training import BatchRow
from paceline.core.trajectory import ScoredHeader
from paceline.data.prompts import Prompt


class TrainingBatches:
    """Plans one batch per step and checks what comes back."""

    def __init__(self, run: Run, inputs: Inputs) -> None:
        self._config, self._journal, self._events, self._inputs = run.config, run.journal, run.events, inputs

    def plan(self, *, step: int, policy: PolicyTag) -> tuple[Order, Refill | None]:
        """Draws a step's prompts and journals them once; the refill is None without dynamic sampling."""
        inputs = self._inputs
        order = Order(
            step=step,
            policy=policy,
            prompts={i: inputs.train.prompts[i] for i in sorted(inputs.cursor.take())},
            asks=self._asks(),
        )
        recorded = self._journal.standing.current
        if recorded is None or (recorded.step, recorded.prompts) != (step, tuple(order.prompts)):
            self._journal.record(
                "dispatch",
                step=step,
                policy=str(policy),
                prompts=list(order.prompts),
                **({"samples": order.counts} if len(order.asks) > 1 else {}),
            )
        return order, self._refill(order)

    def _asks(self) -> tuple[Ask, ...]:
        config, inputs = self._config, self._inputs
        sampling = inputs.sampling(config, config.rollout.temperature)
        samples = Ask(purpose=Purpose.TRAIN, num_samples=config.rollout.n, sampling=sampling)
        if not config.needs_greedy:
            return (samples,)
        greedy = inputs.sampling(config, 0.0)
        return samples, Ask(purpose=Purpose.GREEDY, num_samples=1, sampling=greedy)

    def check(self, step: int, batch: Batch, refill: Refill | None) -> None:
        """Journals the groups that were dropped and a batch that is short.

        Raises:
            RewardError: more groups have no reward than reward.max_dropped_share allows.
            DataError: every group was set aside by dynamic sampling.
        """
        self._check_dropped(step, batch)
        if refill is not None:
            self._check_refill(step, batch, refill)

    def _refill(self, order: Order) -> Refill | None:
        sampling, inputs = self._config.algorithm.dynamic_sampling, self._inputs
        if not sampling.enable:
            return None

        def draw(count: int, without: Collection[int]) -> dict[int, Prompt]:
            return {i: inputs.train.prompts[i] for i in inputs.cursor.take_more(count, without=without)}

        return Refill(
            asked=order.prompts,
            max_extra=int(sampling.max_extra_factor * self._config.data.train_batch_size),
            draw=draw,
            metric=sampling.metric,
        )

    def _check_dropped(self, step: int, batch: Batch) -> None:
        dropped = batch.dropped
        for group in dropped:
            self._journal.record(
                "group_dropped",
                step=step,
                prompt=group.prompt_id,
                reason=group.reason,
                message=group.message,
            )
            self._events.notice(
                f"step {step}: prompt {group.prompt_id} dropped ({group.reason}): {group.message}"
            )
        share, limit = len(dropped) / batch.num_groups, self._config.reward.max_dropped_share
        if share > limit or len(dropped) == batch.num_groups:
            raise RewardError(
                f"step {step}: {len(dropped)} of {batch.num_groups} prompt groups have no reward; the first, "
                f"prompt {dropped[0].prompt_id}: {dropped[0].reason}: {dropped[0].message}. "
                f"Correct the reward, or raise reward.max_dropped_share={limit}",
                kind=RewardErrorKind.UNAVAILABLE,
            )

    def _check_refill(self, step: int, batch: Batch, refill: Refill) -> None:
        sampling, wanted = self._config.algorithm.dynamic_sampling, self._config.data.train_batch_size
        if not refill.num_unfilled:
            return
        num_groups = len({header.trajectory_id.prompt_id for header in batch.samples})
        message = (
            f"step {step}: {num_groups} of {wanted} prompt groups have scores that differ, after "
            f"{refill.num_extra} further prompts "
            f"(algorithm.dynamic_sampling.max_extra_factor={sampling.max_extra_factor:g})"
        )
        self._journal.record(
            "batch_short", step=step, groups=num_groups, wanted=wanted, extra=refill.num_extra
        )
        self._events.notice(message)
        if not batch.samples:
            raise DataError(
                f"{message}: there is nothing to learn from. The prompts are all too hard or all too easy "
                "for the model: choose others, raise rollout.n or max_extra_factor, or begin with a model "
                "that solves some of them"
            )


def rows(batch: Batch) -> tuple[BatchRow, ...]:
    """The rows that the learner trains on, in batch order."""
    greedy = batch.greedy
    return tuple(_row(header, greedy.get(header.trajectory_id.prompt_id)) for header in batch.samples)


def group_rows(group: Sequence[ScoredHeader]) -> list[BatchRow]:
    """The rows of a complete prompt group, of which a greedy answer is none."""
    greedy = next((h for h in group if h.trajectory_id.purpose == Purpose.GREEDY), None)
    return [_row(header, greedy) for header in group if header is not greedy]


def _row(header: ScoredHeader, greedy: ScoredHeader | None) -> BatchRow:
    return BatchRow(
        trajectory_id=header.trajectory_id,
        blob_key=header.blob_key,
        blob_digest=header.blob_digest,
        reward=header.reward or 0.0,
        num_prompt_tokens=header.num_prompt_tokens,
        num_response_tokens=header.num_response_tokens,
        num_sampled_tokens=header.num_sampled_tokens,
        greedy_score=None if greedy is None else greedy.reward or 0.0,
        token_rewards=header.token_rewards,
        num_patches=header.num_patches,
        num_greedy_tokens=0 if greedy is None else greedy.num_sampled_tokens,
    )
