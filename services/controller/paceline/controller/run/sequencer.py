"""The loop of a run, strictly on policy or with a bound on how old samples are.

    FORMING -> PUBLISH v0 -> COMMIT -> (VALIDATE) ->
      { DISPATCH -> COLLECT -> LEARN -> (ROLLBACK) -> PUBLISH -> COMMIT -> (VALIDATE) (CHECKPOINT) } -> ENDED

A step is carried out by a dataflow (`run/dataflow`) over its verbs, which may sample several times. With a
bound the servers sample later steps beside LEARN (`run/lookahead`).

consumes     prompt ids of the cursor, scored headers
waits for    the barrier to close, the learner to train, the servers to hold the new digest
unblocked by trajectories, TrainStep's reply, ReceiveWeights' replies; each with a deadline
produces     policy versions, one line of metrics per step, checkpoints

Step k (from 1) trains version k-1 into version k; after a rollback version k has the weights of an earlier
one. Every transition is journalled before it takes effect.

A step is finished when its metrics are written and its event `step` is in the journal; its data in the broker
is removed after that. A step that was interrupted, by a restart of the controller or the loss of a member,
is executed again from its DISPATCH: prompts that the broker still has are not sent again, the log gives the
same trajectories, and the learner repeats its answer to the same batch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from paceline.controller.batch.collect import Collector
from paceline.controller.batch.inputs import Inputs
from paceline.controller.batch.replay import ReplayBuffer
from paceline.controller.batch.training_batch import TrainingBatches
from paceline.controller.fleet.clients import LearnerClient
from paceline.controller.fleet.supervisor import Supervisor
from paceline.controller.fleet.turns import Turns
from paceline.controller.guard.report import Guard
from paceline.controller.phases import Phase
from paceline.controller.progress import Progress, Run
from paceline.controller.run.align import Alignment
from paceline.controller.run.backoff import MemberLossBackoff
from paceline.controller.run.curriculum import Curriculum
from paceline.controller.run.dataflow.dataflow import Dataflow, carry_out, policy_gradient
from paceline.controller.run.dataflow.verbs import Verbs, timer
from paceline.controller.run.lookahead import Lookahead
from paceline.controller.run.parts import RunParts
from paceline.controller.run.publication import Publication
from paceline.controller.run.records.checkpoints import (
    Checkpoints,
    ControllerState,
    ValidationResult,
)
from paceline.controller.run.records.metrics import MetricsFile
from paceline.controller.run.validation import Validation
from paceline.controller.run.validation_beside import CollectorOf, ValidationBeside
from paceline.controller.run.work_ahead import WorkAheadDriver
from paceline.controller.weights.push import WeightPush
from paceline.core.errors import DeadlineError, LostDataError, PeerLostError
from paceline.core.members import MemberKind, RankRef
from paceline.core.policy import PolicyTag
from paceline.data.mixture import MixtureState
from paceline.service.observability.telemetry import record_training, span

# Members that may end get this long to leave; a rollout server takes some seconds to end its engine.
_DEPARTURE_S = 15.0
# How often a step may be collected again.
_MAX_RECOLLECTS = 3


class Sequencer:
    """Runs the loop, from where the journal stands to trainer.total_steps.

    Args:
        collector_of: makes the collectors of validations beside training (`rollout.validation_servers`).
    """

    def __init__(
        self,
        run: Run,
        progress: Progress,
        *,
        inputs: Inputs,
        collector: Collector,
        learner: LearnerClient,
        push: WeightPush,
        supervisor: Supervisor,
        guard: Guard,
        turns: Turns,
        flow: Dataflow = policy_gradient,
        collector_of: CollectorOf | None = None,
    ) -> None:
        self._run, self._config, self.progress, self._inputs = run, run.config, progress, inputs
        self._collector, self._learner, self._guard = collector, learner, guard
        self._supervisor = supervisor
        self._flow = flow
        self._checkpoints = Checkpoints(run, learner)
        self._metrics_file = MetricsFile(run.dir / "metrics.jsonl")
        self._publication = Publication(run, progress, push, learner, supervisor, turns)
        self._validation = self._validations(collector, collector_of)
        batches = TrainingBatches(run, inputs)
        self._lookahead = Lookahead(
            run, progress, inputs=inputs, batches=batches, collector=collector, publication=self._publication
        )
        self._parts = RunParts(
            run=run,
            progress=progress,
            inputs=inputs,
            batches=batches,
            collector=collector,
            learner=learner,
            publication=self._publication,
            checkpoints=self._checkpoints,
            guard=guard,
            turns=turns,
            ahead=WorkAheadDriver(run, learner, lambda: self._alignment.learner),
            lookahead=self._lookahead,
            replay=ReplayBuffer(run),
            validation=self._validation,
            write_metrics=self._write_metrics,
        )
        self._alignment = Alignment(self._parts, supervisor, self._metrics_file)
        self._curriculum = Curriculum(run.config, inputs.cursor)
        self._backoff, self._last_loss = MemberLossBackoff(run.config.service.recovery_timeout_s), ""
        self._saved = 0

    def _validations(self, collector: Collector, collector_of: CollectorOf | None) -> Validation:
        """Returns the validation: beside training, if some servers only validate."""
        run, progress, inputs, publication = self._run, self.progress, self._inputs, self._publication
        if not run.config.validates_beside:
            return Validation(run, progress, inputs, collector, publication)
        assert collector_of is not None, "validations beside training have collectors of their own"
        return ValidationBeside(run, progress, inputs, collector_of, publication, self._supervisor)

    @property
    def result(self) -> str:
        """Describes in words the result of a run that has ended in order."""
        finished, total = self._run.journal.standing.finished, self._config.trainer.num_steps
        if finished >= total:
            return f"{finished} steps done"
        return f"stopped after step {finished} of {total}: {self.progress.stop_reason}"

    async def run(self) -> None:
        """Runs to the end; aligns again after the loss of a member that a step needs.

        Raises:
            PacelineError: the run cannot go on.
        """
        try:
            while not await self._run_until_loss():
                await self._checkpoints.abandon()
        finally:
            await self._validation.close()
            await self._checkpoints.abandon()
        finished = self._run.journal.standing.finished
        await self._lookahead.withdraw(finished, f"the run ends with step {finished}")
        self._guard.summarize()
        self.progress.move(Phase.ENDED)

    async def _run_until_loss(self) -> bool:
        """Aligns and runs; returns True when all steps are done, and False when a member was lost."""
        try:
            await self._align()
            await self._steps()
        except (PeerLostError, DeadlineError) as error:
            finished = self._run.journal.standing.finished
            pause_s = self._backoff.next_pause(finished, time.monotonic()) if self._is_loss(error) else None
            if pause_s is None:
                raise
            # Until a lost member is back, each attempt fails with a different message.
            if (loss := f"{error.peer} in step {finished + 1}") != self._last_loss:
                self._last_loss = loss
                self._run.events.notice(f"step {self.progress.step}: {error}")
            await asyncio.sleep(pause_s)
            return False
        return True

    def _is_loss(self, error: PeerLostError | DeadlineError) -> bool:
        """Returns whether the loop needs the member that was lost, and the member may come back."""
        if isinstance(error, PeerLostError):
            gone = [m for m in self._supervisor.fleet.members() if m.member_id == error.peer and not m.usable]
            return not any(member.is_final for member in gone)
        learners = [m.member_id for m in self._supervisor.fleet.members(MemberKind.LEARNER)]
        peer = error.peer
        return peer in learners or (isinstance(peer, RankRef) and peer.kind is MemberKind.LEARNER)

    async def _align(self) -> None:
        with span("start"):
            await self._alignment.align()
            while self._alignment.saved is not None:
                self._finish_saved(self._alignment.saved)
                await self._alignment.align()
            await self._validation.go_on()

    async def _steps(self) -> None:
        trainer, standing = self._config.trainer, self._run.journal.standing
        if standing.finished < 0:
            await self._start()
        # A requested stop loses nothing once the finished step is saved.
        while standing.finished < trainer.num_steps and not (
            self.progress.stop_reason and self._saved == standing.finished
        ):
            await self._let_go(standing.finished)
            self.progress.step = standing.finished + 1
            with span("step", attributes={"paceline.step": self.progress.step}):
                await self._step()
        await self._checkpoints.written()

    async def _let_go(self, finished: int) -> None:
        """Lets members end that were told to end, but stayed until the step was finished.

        Raises:
            PeerLostError: the learner is one of them, and has left with the step in a checkpoint.
        """
        departures = self._supervisor.departures
        if not departures.waiting or self._saved != finished:
            return
        await self._checkpoints.written()
        leaving = departures.release()
        names = ", ".join(member.member_id for member in leaving)
        self._run.events.notice(f"step {finished} is finished: {names} may end, as told")
        await self._supervisor.all_gone(lambda: leaving, timeout_s=_DEPARTURE_S)
        learner = next((member for member in leaving if member.kind is MemberKind.LEARNER), None)
        if learner is not None:
            raise PeerLostError("it was told to end, and left after a checkpoint", peer=learner.member_id)

    async def _start(self) -> None:
        """Carries out step 0: publishes the starting model and validates it."""
        metrics = await self._publication.publish(0)
        metrics |= await self._validation.validate(self._policy)
        self._guard.judge_validation(0, metrics)
        validated = await self._validation.results()
        _, metrics = self._judge_results(validated, metrics)
        if self._guard.may_roll_back:
            metrics |= await self._checkpoint(metrics, good=self._guard.good, validated=validated)
        self._finish_step(metrics, validated)
        await self._validation.clean_up()

    async def _step(self) -> None:
        trainer, step = self._config.trainer, self.progress.step
        metrics, rolled_back = await self._train_step()
        metrics |= await self._validation.validate(self._policy)
        stop, guarded = self._guard.judge_validation(step, metrics)
        metrics |= guarded | self._supervisor.usage_metrics()
        self._curriculum.after(step, metrics)
        # A rollback is saved at once, so that a resumed run does not repeat the steps that led to it.
        is_due = rolled_back or trainer.saves_after(step)
        validated = await self._validation.results(is_saved=is_due)
        late_stop, metrics = self._judge_results(validated, metrics)
        fallen, stop = (step, stop) if stop else late_stop
        if is_due or self.progress.stop_reason or self._supervisor.departures.waiting:
            # A rollback leads to the same state as in a run that nobody stopped.
            good = is_due and self._guard.good
            metrics |= await self._checkpoint(metrics, good=good, validated=validated)
        self._finish_step(metrics, validated)
        await self._validation.clean_up()
        if stop:
            await self._checkpoints.written()
            self._guard.summarize()
            raise await self._checkpoints.stopped(fallen, stop, is_published=True)

    def _judge_results(
        self, validated: Sequence[ValidationResult], metrics: Mapping[str, float]
    ) -> tuple[tuple[int, str], dict[str, float]]:
        """Makes the guard judge results that came in.

        Returns:
            The step whose validation must end the run, with the reason ("": none); and the step's metrics.
        """
        stop, of_step = (0, ""), dict(metrics)
        for result in validated:
            fired = {"guard/fired": of_step.get("guard/fired", 0.0)}
            why, guarded = self._guard.judge_validation(result.step, {**fired, **result.metrics})
            stop, of_step = (result.step, why) if why and not stop[1] else stop, of_step | guarded
        return stop, of_step

    # --- a training step

    async def _train_step(self) -> tuple[dict[str, float], bool]:
        """Carries out the dataflow; repeats it from its beginning if the broker has lost the trajectories.

        Returns:
            The step's metrics, and whether it was rolled back.
        """
        began, step, committed = time.monotonic(), self.progress.step, self._policy
        if self.progress.lr_scale is not None:
            self._guard.scale_rates(step, self.progress.lr_scale)
            self.progress.lr_scale = None
        with timer() as cleanup:
            await self._clean_up(step)
        while True:
            cursor = self._lookahead.cursor_after(step - 1)
            verbs = Verbs(
                self._parts,
                self._alignment,
                number=step,
                policy=self._lookahead.policy(step, committed),
                committed=committed,
                began=began,
                cleanup_s=cleanup.seconds,
                patience=self._config.collect_timeout_s,
            )
            try:
                return await self._carried_out(verbs), verbs.rolled_back
            except LostDataError as error:
                await self._recollect(step, cursor, error)

    async def _carried_out(self, verbs: Verbs) -> dict[str, float]:
        try:
            return await carry_out(self._flow, verbs)
        finally:
            await self._lookahead.cancel()

    async def _clean_up(self, step: int) -> None:
        """Removes the last step's data from the broker, which had to stay until the step was finished."""
        try:
            await self._collector.clean_up(step)
        except LostDataError as error:
            await self._recollect(step, self._lookahead.cursor_after(step - 1), error)

    async def _recollect(self, step: int, cursor: MixtureState, error: LostDataError) -> None:
        """Forgets the step's trajectories, so that they are collected again.

        If a blob store may have died, the first attempt keeps what the others have.

        Raises:
            PeerLostError: the learner has trained the step already, and is sent back.
            LostDataError: the trajectories were lost too often.
        """
        current = self._run.journal.standing.in_progress(step)
        if current.num_recollects == _MAX_RECOLLECTS:
            raise error
        if current.trained or self._alignment.version == step:
            await self._alignment.send_back(step, str(error))
        if current.prompts:
            self._run.events.notice(f"step {step}: its trajectories are collected again: {error}")
        is_first = current.num_recollects == 0
        may_keep = is_first and self._collector.has_stores and not self._config.barrier.bound
        position = self._run.journal.standing.log_position
        self._run.journal.record("recollect" if current.prompts else "lost", step=step, reason=str(error))
        if not (may_keep and await self._recalled(position, step - 1)):
            await self._collector.begin_anew()
        self._lookahead.go_to(cursor)

    async def _recalled(self, position: str, version: int) -> bool:
        """Goes back to a position in the log; returns whether the broker still has the run's data."""
        try:
            await self._collector.recall(position, version)
        except LostDataError:
            return False
        return True

    @property
    def _policy(self) -> PolicyTag:
        if self.progress.policy is None:
            raise PeerLostError("no policy is committed yet", peer="rollout")
        return self.progress.policy

    # --- the end of a step

    async def _checkpoint(
        self, metrics: Mapping[str, float], *, good: bool, validated: Sequence[ValidationResult]
    ) -> dict[str, float]:
        """Writes a checkpoint; returns its time as a metric."""
        self.progress.move(Phase.CHECKPOINT)
        state = ControllerState(
            run_id=self._run.id,
            step=self.progress.step,
            policy=str(self._policy),
            cursor=self._lookahead.cursor_after(self.progress.step),
            guard=self._guard.policy.state_dict(),
            good=good,
            metrics={**metrics, "timing_s/checkpoint": 0.0},
            unsure=self._first_unsure(validated),
            validated=validated,
        )
        with span("checkpoint"):
            seconds = await self._checkpoints.save(self._alignment.learner, state)
        self._saved = state.step
        return {"timing_s/checkpoint": seconds}

    def _first_unsure(self, validated: Sequence[ValidationResult]) -> int | None:
        """Returns the first step whose validation beside training may still lead to a rollback, or will."""
        if not self._config.validates_beside:
            return None
        judged = {result.step for result in validated}
        unsure = set(self._run.journal.standing.validations) - judged
        fallen = self._guard.policy.fallen
        return min(unsure | ({fallen} if fallen is not None else set()), default=None)

    def _finish_saved(self, state: ControllerState) -> None:
        """Finishes a step that was interrupted after its checkpoint was written."""
        self.progress.step = state.step
        self._lookahead.go_to(state.cursor)
        self._guard.restore(state.guard)
        self._finish_step(state.metrics, state.validated)

    def _finish_step(self, metrics: Mapping[str, float], validated: Sequence[ValidationResult] = ()) -> None:
        step, digest = self.progress.step, self._write_metrics(metrics)
        # A line of its own for each result, under the step whose weights were evaluated.
        closed = [
            {
                "event": "validated",
                "step": result.step,
                "policy": result.policy,
                "metrics": self._metrics_file.append(result.step, result.metrics),
            }
            for result in validated
        ]
        finished = {
            "event": "step",
            "step": step,
            "metrics": digest,
            "log_position": self._lookahead.log_position_after(step),
            "cursor": self._lookahead.cursor_after(step).to_plain(),
            "guard": self._guard.policy.state_dict(),
        }
        self._run.journal.record_all([*closed, finished])
        self._lookahead.finish(step)
        self._run.events.step(step, metrics)
        for result in validated:
            record_training(step, result.metrics)
            self._run.events.validation(result.step, result.metrics)

    def _write_metrics(self, metrics: Mapping[str, float]) -> str:
        """Writes a step's metrics; returns the digest of their line."""
        self.progress.metrics = dict(metrics)
        digest = self._metrics_file.append(self.progress.step, metrics)
        record_training(self.progress.step, metrics)
        return digest
