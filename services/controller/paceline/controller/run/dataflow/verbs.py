"""The verbs of a step: the operations that a dataflow calls.

    draw -> sample -> (sample ...) -> train -> publish

Journal, barrier, deadlines, turns, guard and rollback are in the verbs, so that any dataflow over them is as
safe as the built-in one. An interrupted step begins again with its first verb: the cursor gives the same
prompts, the log the same samples, and the learner its earlier answer to the same batch. Each sampling's
request is journalled with its number in the step; if a dataflow requests something else the second time, the
run ends.

docs/decisions/0031-a-dataflow-begins-its-step-again.md
"""

from __future__ import annotations

import asyncio
import time
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

from paceline.controller.batch.collected_batch import Batch
from paceline.controller.batch.dispatch import Ask, Order
from paceline.controller.batch.refill import Refill
from paceline.controller.batch.replay import Replay, merged
from paceline.controller.batch.training_rows import TrainingRows
from paceline.controller.fleet.turns import Turn
from paceline.controller.guard.report import TrainedStep
from paceline.controller.phases import Phase
from paceline.controller.run.align import Alignment
from paceline.controller.run.parts import RunParts
from paceline.controller.run.records import metrics as step_metrics
from paceline.controller.run.records.train_metrics import of_origins
from paceline.controller.run.records.trajectories import saving_trajectories
from paceline.core.errors import ConfigError, IllegalTransitionError
from paceline.core.policy import PolicyTag
from paceline.core.samples.trajectory import RewardContext
from paceline.core.training import TrainOrder, TrainResult
from paceline.data.prompts import Prompt
from paceline.data.samples import ScoredSample, ScoredSamples
from paceline.service.observability.telemetry import span


class Verbs:
    """One attempt at a step.

    Args:
        policy: the policy that the step samples from.
        committed: the policy that the learner trains.
        began: when the step began, in monotonic seconds.
        cleanup_s: the seconds that the clean-up before the step took.
        patience: longest time in seconds that a dataflow may take between two verbs.

    Attributes:
        failure: the error of a verb; it ends the step even if the dataflow catches it.
        timeout: expires if the dataflow takes too long between two verbs.
    """

    def __init__(
        self,
        parts: RunParts,
        alignment: Alignment,
        *,
        number: int,
        policy: PolicyTag,
        committed: PolicyTag,
        began: float,
        cleanup_s: float,
        patience: float,
    ) -> None:
        self._parts, self._alignment, self.number = parts, alignment, number
        self._policy, self._committed = policy, committed
        self._began, self._cleanup_s, self.patience = began, cleanup_s, patience
        self._drawn: dict[int, Prompt] | None = None
        self._made: dict[int, Prompt] = {}
        self._num_samplings, self._num_too_long, self._rows = 0, 0, TrainingRows()
        self._result: TrainResult | None = None
        self._replay = Replay()
        self._learn_s, self._under_way, self._ended = 0.0, "", False
        self._notes: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self.rolled_back = False
        self.failure: BaseException | None = None
        self.timeout: asyncio.Timeout | None = None

    # --- prompts

    def draw(self) -> list[Prompt]:
        """Draws the step's prompts, data.train_batch_size of them, in the order of their ids.

        Raises:
            ConfigError: the prompts were drawn already.
        """
        with self._verb("draw"):
            if self._drawn is not None:
                raise ConfigError("the dataflow draws prompts twice in a step; call draw() once")
            self._drawn = self._parts.lookahead.draw(self.number)
            return list(self._drawn.values())

    def prompt(
        self, value: object, *, of: Prompt | ScoredSample, ground_truth: str | None = None
    ) -> Prompt | None:
        """Makes a prompt of text or chat messages, with an id of its own.

        Args:
            value: the prompt, as in a data file.
            of: the prompt from which the new one comes, and which determines its scoring.
            ground_truth: the ground truth for scorers; None: the ground truth of `of`.

        Returns:
            None if the prompt is longer than data.max_prompt_length tokens.
        """
        origin = of.prompt if isinstance(of, ScoredSample) else of
        inputs, limit = self._parts.inputs, self._parts.run.config.data.max_prompt_length
        if origin.images:
            raise ConfigError("a dataflow cannot make prompts of prompts with images")
        context = RewardContext(
            ground_truth=origin.context.ground_truth if ground_truth is None else ground_truth,
            data_source=origin.context.data_source,
            extra=origin.context.extra,
        )
        made = inputs.made_prompt(value, 1 + max(inputs.train.ids()) + len(self._made), context)
        if len(made.token_ids) > limit:
            self._num_too_long += 1
            self._notes["dataflow/prompts_too_long"] = float(self._num_too_long)
            return None
        self._made[made.prompt_id] = made
        return made

    def reply(self, sample: ScoredSample, text: str) -> Prompt | None:
        """Makes the prompt that continues a sample: its prompt, the sample, then `text` as the user's
        message."""
        return self.prompt(sample.continued(text), of=sample)

    # --- samples

    def ask(self, purpose: str = "train", n: int | None = None, *, temperature: float | None = None) -> Ask:
        """Sets the samples per prompt for a purpose; the defaults are rollout.n and rollout.temperature."""
        return self._parts.batches.ask(purpose, n, temperature)

    async def sample(
        self, prompts: Iterable[Prompt | None], *asks: Ask | str, texts: bool = True
    ) -> ScoredSamples:
        """Samples from the step's policy and has the samples scored: DISPATCH and COLLECT.

        Args:
            prompts: prompts that were drawn or made; a None is skipped.
            asks: purposes with their samples per prompt, or only purposes; none: what the configured
                estimator needs.
            texts: whether the returned samples have their texts.

        Returns:
            The samples of all prompts, except groups without a reward and those that dynamic sampling set
            aside.
        """
        with self._verb("sample"):
            chosen = sorted((p for p in prompts if p is not None), key=lambda prompt: prompt.prompt_id)
            if not chosen:
                return ScoredSamples([])
            batches = self._parts.batches
            order = Order(
                step=self.number,
                policy=self._policy,
                prompts={prompt.prompt_id: prompt for prompt in chosen},
                asks=tuple(self.ask(a) if isinstance(a, str) else a for a in asks) or batches.asks,
            )
            self._rows.reserve(order)
            self._num_samplings += 1
            refill = batches.begin(order, self._num_samplings, self._drawn)
            batch = await self._collected(order, refill)
            batches.check(self.number, batch, refill)
            return await self._samples(batch, texts=texts)

    async def _collected(self, order: Order, refill: Refill | None) -> Batch:
        parts = self._parts
        parts.progress.move(Phase.DISPATCH)
        # A step that was dispatched ahead was sampled before the current policy was committed.
        mixes = parts.run.config.pushes_in_flight
        is_over = self._alignment.version == self.number or (order.policy != self._committed and not mixes)
        if order.policy == self._committed or mixes:
            with span("dispatch"):
                await parts.collector.dispatch(order)
        if not is_over:
            await parts.lookahead.send(self.number, self._committed)
        parts.progress.move(Phase.COLLECT)
        if (batch := parts.lookahead.batch(self.number)) is not None:
            return batch
        with span("collect"):
            if is_over:
                # The trajectories are in the log, but the policy is gone.
                return await parts.collector.collect(order, refill, is_over=lambda: True)
            async with parts.ahead.during(order, parts.guard.policy.adjustments) as watch:
                collection = parts.collector.collect(order, refill, watch=watch)
                return await parts.publication.to_newcomers(self._committed, collection)

    async def _samples(self, batch: Batch, *, texts: bool) -> ScoredSamples:
        prompts: Mapping[int, Prompt] = self._prompts
        headers = [*batch.samples, *(header for headers in batch.beside.values() for header in headers)]
        stored = [""] * len(headers)
        if texts:
            stored = await self._parts.collector.mailboxes.texts(headers, required=True)
        made = iter(
            ScoredSample(
                prompt=prompts[header.trajectory_id.prompt_id],
                header=header,
                reward=header.reward or 0.0,
                text=text,
            )
            for header, text in zip(headers, stored, strict=True)
        )
        samples = ScoredSamples(
            [next(made) for _ in batch.samples],
            {purpose: [next(made) for _ in of_purpose] for purpose, of_purpose in batch.beside.items()},
        )
        self._rows.note(batch, samples)
        return samples

    @property
    def _prompts(self) -> Mapping[int, Prompt]:
        return ChainMap(self._made, cast(dict[int, Prompt], self._parts.inputs.train.prompts))

    # --- training

    async def train(self, samples: Iterable[ScoredSample]) -> Mapping[str, float]:
        """Trains the policy on samples of this step: LEARN.

        Returns:
            The learner's metrics.

        Raises:
            ConfigError: a sample occurs twice, is not of this step, or may not be trained on.
        """
        with self._verb("train"):
            if self._result is not None:
                raise ConfigError(
                    "the dataflow trains twice in a step; a step has one version, and one train()"
                )
            parts, journal = self._parts, self._parts.run.journal
            rows, listed = self._rows.choose(samples)
            self._replay = again = await parts.replay.draw(self.number, rows)
            if again.blobs:
                await parts.collector.store(again.blobs, self.number)
            order = TrainOrder(
                step=self.number,
                policy=self._policy,
                rows=merged(rows, again.rows) if again.rows else rows,
                adjustments=parts.guard.policy.adjustments,
            )
            journal.record(
                "batch",
                step=self.number,
                policy=str(self._policy),
                digest=order.digest,
                num_rows=len(order.rows),
                **({} if listed is None else {"rows": listed}),
                **({"again": again.listed} if again.rows else {}),
            )
            parts.progress.move(Phase.LEARN)
            try:
                await parts.turns.take(Turn.LEARNER)
                parts.lookahead.begin(self.number, self._committed)
                with span("learn"), timer() as learn:
                    result = await parts.learner.train(self._alignment.learner, order)
            except IllegalTransitionError as error:
                # The step was trained on trajectories that the broker has since lost; these are different
                # ones.
                await self._alignment.send_back(self.number, str(error))
            if not journal.standing.in_progress(self.number).trained:
                journal.record("trained", step=self.number, digest=order.digest)
            self._result, self._learn_s = result, learn.seconds
            return dict(result.metrics)

    async def publish(self) -> None:
        """Makes the guard judge the step, and brings the weights to the rollout servers: PUBLISH and COMMIT.

        Raises:
            ConfigError: nothing was trained.
            GuardError: a rule ends the run.
        """
        with self._verb("publish"):
            result, parts = self._result, self._parts
            if result is None:
                raise ConfigError(
                    "the dataflow publishes what was not trained; call train() before publish()"
                )
            batch = self._rows.batch
            is_resumed = self._alignment.resumed == self.number
            # With a bound the first step of several waits for its samples, and the others do not.
            is_first = parts.run.config.barrier.bound > 0 and self._policy == self._committed
            step_s = None if is_resumed or is_first else time.monotonic() - self._began
            async with saving_trajectories(
                parts.run, self.number, batch, self._prompts, parts.collector.mailboxes
            ):
                guarded = await self._judge(result, batch, step_s)
                batch = replace(batch, gen_s=batch.gen_s + await parts.lookahead.settle())
                await parts.validation.make_way(self.number)
                pushed = await parts.publication.publish(self.number)
            self._metrics = step_metrics.assemble(
                batch,
                learner={**result.metrics, **guarded},
                push=pushed,
                learn_s=self._learn_s,
                cleanup_s=self._cleanup_s,
                step_s=time.monotonic() - self._began,
            )
            self._metrics |= self._replay.metrics
            self._metrics |= of_origins(batch.samples, self._prompts, parts.inputs)
            if parts.run.config.barrier.bound:
                self._metrics |= step_metrics.of_ages(batch.samples, self.number)
            self._ended = True

    async def _judge(self, result: TrainResult, batch: Batch, seconds: float | None) -> dict[str, float]:
        """Applies the guard to weights that are not published yet; rolls them back if the guard requires
        it."""
        parts, step = self._parts, self.number
        decision, metrics = parts.guard.judge(
            TrainedStep(
                step=step, result=result, batch=batch, seconds=seconds, replays=bool(self._replay.rows)
            )
        )
        if decision.stop:
            await parts.checkpoints.written()
            parts.write_metrics({**result.metrics, **metrics})
            parts.guard.summarize()
            raise await parts.checkpoints.stopped(step, decision.stop)
        if decision.rollback:
            parts.progress.move(Phase.ROLLBACK)
            with span("rollback"):
                await parts.lookahead.withdraw(step, f"step {step} is rolled back")
                metrics |= await parts.checkpoints.roll_back(
                    self._alignment.learner, step=step, reason=decision.reason, before=decision.before
                )
            parts.guard.rolled_back(step, to_step=int(metrics["guard/rolled_back_to"]))
            self.rolled_back = True
        return metrics

    # --- the end

    def stop(self, reason: str) -> None:
        """Ends the run after this step, with a checkpoint."""
        self._parts.progress.stop_reason = reason

    def allow(self, seconds: float) -> None:
        """Allows the dataflow to take `seconds` between two verbs."""
        self.patience = seconds
        self._wait(seconds)

    def note_wait(self) -> None:
        """Journals that the step waits for its dataflow."""
        self._parts.run.journal.record("waiting", step=self.number)

    def note(self, name: str, value: float) -> None:
        """Adds `dataflow/NAME` to the step's metrics."""
        self._notes[f"dataflow/{name}"] = float(value)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the step, which must be published.

        Raises:
            ConfigError: the dataflow has not published the step.
        """
        if self.failure is not None:
            raise self.failure
        if not self._ended:
            raise ConfigError(
                f"the dataflow ended in step {self.number} without publish(); each step trains and publishes "
                "one version"
            )
        return self._metrics | self._parts.turns.take_metrics() | self._notes

    @contextmanager
    def _verb(self, name: str) -> Iterator[None]:
        """Runs one verb at a time, and none after a failed one; stops the dataflow's timeout meanwhile."""
        if self.failure is not None:
            raise self.failure
        if self._under_way or self._ended:
            after = f"{self._under_way}() is under way" if self._under_way else "the step is published"
            raise ConfigError(
                f"the dataflow calls {name}() while {after}; await each verb, and publish() last"
            )
        self._under_way = name
        self._wait(None)
        try:
            yield
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self._under_way = ""
            self._wait(self.patience)

    def _wait(self, seconds: float | None) -> None:
        if self.timeout is not None and not self.timeout.expired():
            now = asyncio.get_running_loop().time()
            self.timeout.reschedule(None if seconds is None else now + seconds)


class Timer:
    """The seconds that a block took."""

    seconds: float = 0.0


@contextmanager
def timer() -> Iterator[Timer]:
    """Measures the seconds that the block takes."""
    measured, began = Timer(), time.monotonic()
    yield measured
    measured.seconds = time.monotonic() - began
