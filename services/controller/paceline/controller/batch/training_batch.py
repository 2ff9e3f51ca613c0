"""The batch of a training step: the requests of its samplings, whether enough came back, and the rows.

cursor -> ask -> begin -> (DISPATCH, COLLECT with refills) -> check -> rows
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping

from paceline.controller.batch.collected_batch import Batch
from paceline.controller.batch.dispatch import Ask, Order
from paceline.controller.batch.inputs import Inputs
from paceline.controller.batch.refill import Refill
from paceline.controller.progress import Run
from paceline.core.errors import ConfigError, DataError, RewardError, RewardErrorKind
from paceline.core.ids import Purpose, check_purpose
from paceline.data.prompts import Prompt


class TrainingBatches:
    """Journals the requests of a step's samplings, and checks their results."""

    def __init__(self, run: Run, inputs: Inputs) -> None:
        self._config, self._journal, self._events, self._inputs = run.config, run.journal, run.events, inputs

    @property
    def asks(self) -> tuple[Ask, ...]:
        """The samples of each prompt that the configured estimator needs."""
        samples = self.ask(Purpose.TRAIN)
        return (samples, self.ask(Purpose.GREEDY, 1, 0.0)) if "greedy" in self._config.needs else (samples,)

    def ask(self, purpose: str, n: int | None = None, temperature: float | None = None) -> Ask:
        """Returns an ask; `n` and `temperature` default to rollout.n and rollout.temperature.

        Raises:
            ConfigError: the purpose or a number is not allowed.
        """
        rollout = self._config.rollout
        num_samples = rollout.n if n is None else n
        value = rollout.temperature if temperature is None else temperature
        try:
            check_purpose(purpose)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if purpose == Purpose.VALIDATE or num_samples < 1 or not 0 <= value < math.inf:
            raise ConfigError(
                f"a dataflow asks for {num_samples} samples at temperature {value} for {purpose!r}: ask for "
                "at least one at a temperature of 0 or more, and leave the purpose `validate` to validations"
            )
        return Ask(
            purpose=str(purpose), num_samples=num_samples, sampling=self._inputs.sampling(self._config, value)
        )

    def begin(self, order: Order, number: int, drawn: Mapping[int, Prompt] | None) -> Refill | None:
        """Journals a sampling's request, once; the refill is None without dynamic sampling.

        Args:
            number: the sampling's number in its step, from 1.

        Raises:
            ConfigError: the step asked for something else before it was interrupted, or asks twice.
        """
        if drawn is None:
            raise ConfigError("the dataflow samples before it draws prompts; call draw() first")
        if len({ask.purpose for ask in order.asks}) < len(order.asks):
            raise ConfigError("a sampling names a purpose twice; give each of its asks another purpose")
        is_first = number == 1 and order.prompts.keys() == drawn.keys()
        if number == 1:
            self.record_dispatch(order, drawn, order.counts if is_first else {})
        if is_first:
            return self._refill(order)
        self._record_sampling(order, number)
        return None

    def record_dispatch(self, order: Order, drawn: Mapping[int, Prompt], counts: Mapping[str, int]) -> None:
        """Journals a step's dispatch, once for each policy that it samples from.

        Args:
            counts: samples per prompt, by purpose; empty if they are asked for later.

        Raises:
            ConfigError: the step asked for something else before.
        """
        recorded, policy = self._journal.standing.dispatched(order.step), str(order.policy)
        if recorded is None or (recorded.prompts, recorded.policy) != (tuple(drawn), policy):
            plain = {str(Purpose.TRAIN): self._config.rollout.n}
            self._journal.record(
                "dispatch",
                step=order.step,
                policy=policy,
                prompts=list(drawn),
                **({} if counts == plain else {"samples": counts}),
            )
        elif recorded.purposes != tuple(counts):
            raise _other(order.step, 1)

    def _record_sampling(self, order: Order, number: int) -> None:
        """Journals a sampling each time that it begins; the digest tells whether it is the same as before."""
        standing, digest = self._journal.standing, _asked(order)
        before = standing.in_progress(order.step).samplings.get(number, digest)
        if before != digest:
            raise _other(order.step, number)
        self._journal.record(
            "sampling",
            step=order.step,
            number=number,
            policy=str(order.policy),
            prompts=list(order.prompts),
            samples=order.counts,
            digest=digest,
        )

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
            self._journal.record("group_dropped", step=step, **group.fields)
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


def _asked(order: Order) -> str:
    """Returns a digest of everything that an order asks for, including all tokens."""
    digest = hashlib.blake2b(digest_size=16)
    for ask in order.asks:
        digest.update(f"{ask}\n".encode())
    for prompt_id, prompt in order.prompts.items():
        digest.update(f"{prompt_id}\n{prompt.context.ground_truth}\n".encode(errors="backslashreplace"))
        digest.update(prompt.token_ids.tobytes())
    return digest.hexdigest()


def _other(step: int, number: int) -> ConfigError:
    return ConfigError(
        f"step {step} continues, but its sampling {number} asks for something else than before the "
        "interruption: what a dataflow does in a step must follow from its samples alone, without clocks, "
        "random numbers or files that change. Set the dataflow and the estimator back as they were"
    )
