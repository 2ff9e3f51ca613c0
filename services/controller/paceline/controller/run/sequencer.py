"""The loop of a run, strictly on policy.

    FORMING -> PUBLISH v0 -> COMMIT -> (VALIDATE) ->
      { DISPATCH -> COLLECT -> LEARN -> (ROLLBACK) -> PUBLISH -> COMMIT -> (VALIDATE) (CHECKPOINT) } -> ENDED

    consumes     prompt ids of the cursor, scored headers
    waits for    the barrier to close, the learner to train, the servers to hold the new digest
    unblocked by trajectories, TrainStep's reply, ReceiveWeights' replies; each with a deadline
    produces     policy versions, one line of metrics per step, checkpoints

Step k (from 1) trains version k-1 into version k; after a rollback version k has the weights of an earlier
one. Every transition is journalled before it takes effect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from paceline.controller.batch.dispatch import Batch, Collector, Order
from paceline.controller.batch.inputs import Inputs
from paceline.controller.batch.training_batch import TrainingBatches, rows
from paceline.controller.fleet.clients import LearnerClient
from paceline.controller.fleet.supervisor import Supervisor
from paceline.controller.guard.policy import GuardDecision
from paceline.controller.guard.report import Guard, StepOutcome
from paceline.controller.phases import Phase
from paceline.controller.progress import Progress, Run
from paceline.controller.run import metrics as step_metrics
from paceline.controller.run.checkpoints import Checkpoints, ControllerState
from paceline.controller.run.metrics import MetricsFile
from paceline.controller.run.trajectories import TrajectoryFile
from paceline.controller.weights.push import WeightPush
from paceline.core.errors import PeerLostError
from paceline.core.ids import Purpose
from paceline.core.policy import PolicyTag
from paceline.core.training import TrainOrder, TrainResult
from paceline.data.prompts import PromptSet
from paceline.service.telemetry import record, span


class Sequencer:
    """Runs the loop, from where `progress.step` stands to trainer.total_steps."""

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
    ) -> None:
        self._run, self._config, self.progress, self._inputs = run, run.config, progress, inputs
        self._collector, self._learner, self._push = collector, learner, push
        self._supervisor, self._guard = supervisor, guard
        self._batches = TrainingBatches(run, inputs)
        self._checkpoints = Checkpoints(run, learner)
        # Step 0 is written again by a run that starts from the beginning or from the checkpoint of step 0.
        self._metrics_file = MetricsFile(run.dir / "metrics.jsonl", last_step=progress.step or -1)

    async def run(self) -> None:
        """Runs to the end."""
        trainer, progress = self._config.trainer, self.progress
        with span("start"):
            progress.move(Phase.FORMING)
            await self._supervisor.all_ready(
                num_rollouts=self._config.rollout.replicas,
                step=progress.step,
                timeout_s=self._config.service.startup_timeout_s,
            )
            metrics = await self._publish(progress.step)
        if progress.step == 0:
            if trainer.val_before_train:
                metrics |= await self._validate()
            if self._guard.may_roll_back:
                metrics |= await self._checkpoint()
            self._finish_step(metrics)
        while progress.step < trainer.total_steps:
            progress.step += 1
            with span("step", attributes={"paceline.step": progress.step}):
                metrics, rolled_back = await self._train_step()
                last = progress.step == trainer.total_steps
                if last or (trainer.test_freq and progress.step % trainer.test_freq == 0):
                    metrics |= await self._validate()
                # A rollback is saved at once, so that a resumed run does not repeat the steps that led to it.
                if last or rolled_back or (trainer.save_freq and progress.step % trainer.save_freq == 0):
                    metrics |= await self._checkpoint()
                self._finish_step(metrics)
        self._guard.summarize()
        progress.move(Phase.ENDED)

    # --- a training step

    async def _train_step(self) -> tuple[dict[str, float], bool]:
        """Runs DISPATCH to COMMIT; returns the step's metrics, and whether it was rolled back."""
        began = time.monotonic()
        await self._admit_newcomers()
        step, policy = self.progress.step, self._policy
        batch = await self._collect(step, policy)
        result, learn_s = await self._learn(step, policy, batch)
        decision, guarded = await self._judge(result, batch, time.monotonic() - began)
        pushed = await self._publish(step)
        with _timer() as cleanup:
            await self._collector.clean_up(policy, batch)
        metrics = step_metrics.assemble(
            batch,
            learner={**result.metrics, **guarded},
            push=pushed,
            learn_s=learn_s,
            cleanup_s=cleanup.seconds,
            step_s=time.monotonic() - began,
        )
        return metrics, decision.rollback

    async def _collect(self, step: int, policy: PolicyTag) -> Batch:
        """DISPATCH and COLLECT."""
        order, refill = self._batches.plan(step=step, policy=policy)
        self.progress.move(Phase.DISPATCH)
        with span("dispatch"):
            await self._collector.dispatch(order)
        self.progress.move(Phase.COLLECT)
        with span("collect"):
            batch = await self._collector.collect(order, refill)
        self._batches.check(step, batch, refill)
        return batch

    async def _learn(self, step: int, policy: PolicyTag, batch: Batch) -> tuple[TrainResult, float]:
        """LEARN; returns the learner's result and the seconds it took."""
        self.progress.move(Phase.LEARN)
        order = TrainOrder(step=step, policy=policy, rows=rows(batch), adjustments=self._guard.adjustments)
        with span("learn"), _timer() as learn:
            result, _ = await asyncio.gather(
                self._learner.train(self._supervisor.learner, order),
                self._save_trajectories("step", batch, self._inputs.train),
            )
        return result, learn.seconds

    async def _judge(
        self, result: TrainResult, batch: Batch, seconds: float
    ) -> tuple[GuardDecision, dict[str, float]]:
        """Applies the guard to weights that are not published yet; rolls them back if it says so.

        Raises:
            GuardError: a rule ends the run.
        """
        step = self.progress.step
        decision, metrics = self._guard.judge(
            StepOutcome(step=step, result=result, batch=batch, seconds=seconds)
        )
        if decision.stop:
            self._finish_step({**result.metrics, **metrics})
            self._guard.summarize()
            raise self._checkpoints.stopped(step, decision.stop)
        if decision.rollback:
            self.progress.move(Phase.ROLLBACK)
            with span("rollback"):
                metrics |= await self._checkpoints.roll_back(
                    self._supervisor.learner, step=step, reason=decision.reason
                )
            self._guard.rolled_back(step, to_step=int(metrics["guard/rolled_back_to"]))
        return decision, metrics

    # --- weights

    async def _publish(self, version: int) -> dict[str, float]:
        """PUBLISH and COMMIT, over a new weight group if the current one no longer fits the fleet."""
        while True:
            await self._ensure_epoch(version)
            self.progress.move(Phase.PUBLISH)
            with span("publish", attributes={"paceline.version": version}):
                candidate = await self._push.transfer(version)
            if candidate is not None:
                break
        self._run.journal.record("commit", version=version, digest=candidate.policy.digest)
        self.progress.move(Phase.COMMIT)
        with span("commit", attributes={"paceline.version": version}):
            metrics = await self._push.commit(candidate)
        self.progress.policy = candidate.policy
        return metrics

    async def _ensure_epoch(self, version: int) -> None:
        learner, rollouts = self._supervisor.learner, self._supervisor.rollouts
        if self._push.epochs.fits(learner, rollouts):
            return
        if self.progress.phase is not Phase.FORMING:
            self.progress.move(Phase.FORMING)
        learner_version = await self._push.epochs.form(learner, rollouts)
        if learner_version != version:
            raise PeerLostError(
                f"the learner holds version {learner_version}, the run stands at {version}: it was "
                "restarted; start the same command again: it goes on from the newest checkpoint",
                peer=learner.member_id,
            )

    async def _admit_newcomers(self) -> None:
        """Pushes the current version to servers that came since the last push."""
        if not self._push.epochs.fits(self._supervisor.learner, self._supervisor.rollouts):
            await self._publish(self._policy.version)

    @property
    def _policy(self) -> PolicyTag:
        if self.progress.policy is None:
            raise PeerLostError("no policy is committed yet", peer="rollout")
        return self.progress.policy

    # --- between steps

    async def _validate(self) -> dict[str, float]:
        """VALIDATE; returns its metrics, {} without held-out prompts."""
        if self._inputs.val is None:
            return {}
        began = time.monotonic()
        self.progress.move(Phase.VALIDATE)
        val, config = self._config.rollout.val, self._config
        ids = self._inputs.val.ids()[: config.data.val_max_prompts]
        order = Order(
            step=self.progress.step,
            purpose=Purpose.VALIDATE,
            policy=self._policy,
            prompts={i: self._inputs.val.prompts[i] for i in ids},
            num_samples=val.n,
            sampling=self._inputs.sampling(config, val.temperature),
        )
        with span("validate"):
            await self._collector.dispatch(order)
            batch = await self._collector.collect(order)
        await self._save_trajectories("val", batch, self._inputs.val)
        await self._collector.discard(batch)
        for group in batch.dropped:
            self._run.journal.record(
                "val_group_dropped",
                step=order.step,
                prompt=group.prompt_id,
                reason=group.reason,
                message=group.message,
            )
        return step_metrics.validation(batch, seconds=time.monotonic() - began)

    async def _checkpoint(self) -> dict[str, float]:
        """CHECKPOINT; returns the time it took as a metric."""
        self.progress.move(Phase.CHECKPOINT)
        state = ControllerState(
            run_id=self._run.id,
            step=self.progress.step,
            cursor=self._inputs.cursor.state,
            num_prompts=len(self._inputs.train.prompts),
            seed=self._config.trainer.seed,
            guard=self._guard.state_dict(),
            good=self._guard.good,
        )
        with span("checkpoint"):
            return {"timing_s/checkpoint": await self._checkpoints.save(self._supervisor.learner, state)}

    async def _save_trajectories(self, name: str, batch: Batch, prompts: PromptSet) -> None:
        if self._config.trainer.save_trajectories:
            folder, step = self._run.dir / "trajectories", self.progress.step
            file = TrajectoryFile(folder / f"{name}_{step:06d}.parquet", step=step, prompts=prompts.prompts)
            await file.write(batch.samples, self._collector.texts)

    def _finish_step(self, metrics: Mapping[str, float]) -> None:
        self.progress.metrics = dict(metrics)
        self._metrics_file.append(self.progress.step, metrics)
        for name, value in metrics.items():
            record(name, value)
        self._run.events.step(self.progress.step, metrics)


class _Timer:
    seconds: float = 0.0


@contextmanager
def _timer() -> Iterator[_Timer]:
    timer, began = _Timer(), time.monotonic()
    yield timer
    timer.seconds = time.monotonic() - began
