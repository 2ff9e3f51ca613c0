"""The loop of a run, strictly on policy.

    FORMING -> PUBLISH v0 -> COMMIT -> (VALIDATE) -> { DISPATCH -> COLLECT -> LEARN -> (ROLLBACK) -> PUBLISH -> COMMIT -> (VALIDATE) (CHECKPOINT) } -> ENDED

    consumes     prompt ids of the cursor, scored headers
    waits for    the barrier to close, the learner to train, every server to hold the new digest
    unblocked by trajectories, TrainStep's reply, ReceiveWeights' replies; each with a deadline
    produces     policy versions, one line of metrics a step, checkpoints

Step k (from 1) trains version k-1 into version k; after a rollback version k has the weights of an earlier one. Every transition is journalled before it takes effect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from paceline.broker import names
from paceline.broker.base import Broker
from paceline.config.run import RunConfig
from paceline.controller.batch.dispatch import Collected, Collector, Order
from paceline.controller.batch.inputs import Inputs
from paceline.controller.batch.training_batch import TrainingBatches, rows
from paceline.controller.events import EventHub
from paceline.controller.fleet.clients import Peers
from paceline.controller.fleet.membership import Health, Member
from paceline.controller.fleet.supervisor import FleetWatch
from paceline.controller.guard.policy import Decision
from paceline.controller.guard.report import GuardWatch, Trained
from paceline.controller.journal import Journal
from paceline.controller.run import metrics as step_metrics
from paceline.controller.run import phases
from paceline.controller.run.checkpoints import ControllerState
from paceline.controller.run.keeper import Keeper
from paceline.controller.run.phases import Phase
from paceline.controller.run.records import MetricsFile, write_trajectories
from paceline.controller.weights.push import WeightPush
from paceline.core.errors import PeerLostError
from paceline.core.ids import Purpose
from paceline.core.members import RECEIVABLE_STATES, LearnerState, MemberKind, RewardState
from paceline.core.policy import PolicyTag
from paceline.core.training import TrainOrder, TrainResult
from paceline.data.prompts import PromptSet
from paceline.service.telemetry import record, span


@dataclass(kw_only=True, slots=True)
class Progress:
    """Where the run stands; read by GetStatus."""

    step: int = 0
    phase: Phase = Phase.STARTING
    phase_began: float = field(default_factory=time.monotonic)
    policy: PolicyTag | None = None
    admitted: int = 0
    wanted: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


class Sequencer:
    """Runs the loop; everything that it uses is handed in."""

    def __init__(
        self,
        *,
        config: RunConfig,
        run_id: str,
        run_dir: Path,
        inputs: Inputs,
        broker: Broker,
        collector: Collector,
        peers: Peers,
        push: WeightPush,
        fleet: FleetWatch,
        journal: Journal,
        hub: EventHub,
        guard: GuardWatch,
        metrics_file: MetricsFile,
        progress: Progress,
    ) -> None:
        self._config, self._run_id, self._run_dir, self._inputs = config, run_id, run_dir, inputs
        self._broker, self._collector, self._peers, self._push = broker, collector, peers, push
        self._fleet, self._journal, self._hub, self._metrics_file = fleet, journal, hub, metrics_file
        self.progress = progress
        self._guard = guard
        self._keeper = Keeper(config, run_id, run_dir, peers, journal)
        self._batches = TrainingBatches(
            config=config, inputs=inputs, collector=collector, journal=journal, hub=hub, move=self._move
        )

    async def run(self) -> None:
        """Runs from where `progress.step` stands to trainer.total_steps."""
        trainer, progress = self._config.trainer, self.progress
        with span("start"):
            await self._move(Phase.FORMING)
            await self._await_fleet()
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
                # What was gone back to is put down at once: a run that is started again must not go through the same again.
                if last or rolled_back or (trainer.save_freq and progress.step % trainer.save_freq == 0):
                    metrics |= await self._checkpoint()
                self._finish_step(metrics)
        await self._guard.summarize()
        await self._move(Phase.ENDED)

    async def _train_step(self) -> tuple[dict[str, float], bool]:
        """The step's metrics, and whether it ended in a rollback."""
        began = time.monotonic()
        await self._admit_newcomers()
        step, policy = self.progress.step, self._policy
        collected = await self._batches.make(step=step, policy=policy)
        await self._move(Phase.LEARN)
        with span("learn"), _timer() as learn:
            result, _ = await asyncio.gather(
                self._peers.train(
                    self._learner,
                    TrainOrder(
                        step=step,
                        policy=policy,
                        rows=tuple(rows(collected)),
                        adjustments=self._guard.adjustments,
                    ),
                ),
                self._save_trajectories("step", collected, self._inputs.train),
            )
        decision, guarded = await self._judge(result, collected, time.monotonic() - began)
        pushed = await self._publish(step)
        with _timer() as cleanup:
            await self._clean_up(policy, collected)
        metrics = step_metrics.assemble(
            collected,
            learner={**result.metrics, **guarded},
            push=pushed,
            learn_s=learn.seconds,
            cleanup_s=cleanup.seconds,
            step_s=time.monotonic() - began,
        )
        return metrics, decision.rollback

    async def _validate(self) -> dict[str, float]:
        if self._inputs.val is None:
            return {}
        began = time.monotonic()
        await self._move(Phase.VALIDATE)
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
            collected = await self._collector.collect(order)
        await self._save_trajectories("val", collected, self._inputs.val)
        await self._broker.delete_blobs(collected.blob_keys)
        for group in collected.dropped:
            await self._journal.record(
                "val_group_dropped",
                step=order.step,
                prompt=group.prompt_id,
                reason=group.reason,
                message=group.message,
            )
        return step_metrics.validation(collected, seconds=time.monotonic() - began)

    async def _checkpoint(self) -> dict[str, float]:
        await self._move(Phase.CHECKPOINT)
        state = ControllerState(
            run_id=self._run_id,
            step=self.progress.step,
            cursor=self._inputs.cursor.state,
            num_prompts=len(self._inputs.train.prompts),
            seed=self._config.trainer.seed,
            guard=self._guard.state_dict(),
            good=self._guard.good,
        )
        with span("checkpoint"):
            return {"timing_s/checkpoint": await self._keeper.save(self._learner, state)}

    async def _judge(
        self, result: TrainResult, collected: Collected, seconds: float
    ) -> tuple[Decision, dict[str, float]]:
        """What the guard makes of weights that nobody has seen yet; a rollback is done when this returns.

        Raises:
            GuardError: a rule ends the run.
        """
        step = self.progress.step
        decision, metrics = await self._guard.judge(
            Trained(step=step, result=result, collected=collected, seconds=seconds)
        )
        if decision.stop:
            self._finish_step({**result.metrics, **metrics})
            await self._guard.summarize()
            raise self._keeper.stopped(step, decision.stop)
        if decision.rollback:
            await self._move(Phase.ROLLBACK)
            with span("rollback"):
                metrics |= await self._keeper.go_back(self._learner, step=step, reason=decision.reason)
            self._guard.rolled_back(step, to_step=int(metrics["guard/rolled_back_to"]))
        return decision, metrics

    # --- parts of a step

    async def _publish(self, version: int) -> dict[str, float]:
        """PUBLISH and COMMIT, over a new group where the old one does not fit the fleet any more."""
        while True:
            rollouts = self._ready_rollouts()
            if not self._push.fits(self._learner, rollouts):
                await self._form(rollouts, version)
            await self._move(Phase.PUBLISH)
            with span("publish", attributes={"paceline.version": version}):
                candidate = await self._push.transfer(version)
            if candidate is not None:
                break
        await self._journal.record("commit", version=version, digest=candidate.policy.digest)
        await self._move(Phase.COMMIT)
        with span("commit", attributes={"paceline.version": version}):
            metrics = await self._push.commit(candidate)
        self.progress.policy = candidate.policy
        return metrics

    async def _form(self, rollouts: list[Member], version: int) -> None:
        if self.progress.phase is not Phase.FORMING:
            await self._move(Phase.FORMING)
        held = await self._push.form(self._learner, rollouts)
        if held != version:
            raise PeerLostError(
                f"the learner holds version {held}, the run stands at {version}: it was restarted; start the same command again: it goes on "
                "from the newest checkpoint",
                peer=self._learner.member_id,
            )

    async def _admit_newcomers(self) -> None:
        """Takes servers that came since the last push into the group, at the current version."""
        if not self._push.fits(self._learner, self._ready_rollouts()):
            await self._publish(self._policy.version)

    async def _clean_up(self, policy: PolicyTag, collected: Collected) -> None:
        await self._broker.delete_blobs(collected.blob_keys)
        await self._broker.delete_streams([names.prompts(self._run_id, policy.version)])
        for stream in (names.trajectories(self._run_id), names.scored(self._run_id)):
            await self._broker.trim(stream)

    async def _save_trajectories(self, name: str, collected: Collected, prompts: PromptSet) -> None:
        if self._config.trainer.save_trajectories:
            await asyncio.to_thread(
                write_trajectories,
                self._run_dir / "trajectories",
                self.progress.step,
                name,
                collected.batch,
                prompts.prompts,
            )

    # --- the fleet

    async def _await_fleet(self) -> None:
        def missing() -> list[str]:
            fleet = self._fleet.fleet
            lacking = (
                []
                if any(m.state is LearnerState.READY for m in fleet.usable(MemberKind.LEARNER))
                else ["the learner"]
            )
            if not any(m.state is RewardState.SERVING for m in fleet.usable(MemberKind.REWARD)):
                lacking.append("the reward service")
            short = self._config.rollout.replicas - len(self._ready_rollouts())
            return lacking + ([f"{short} rollout server(s)"] if short > 0 else [])

        def settled() -> bool:
            # A member that dies while starting is an error now, not at the deadline.
            dead = [m for m in self._fleet.fleet.members() if not m.usable]
            if dead and missing():
                reasons = "; ".join(f"{m.member_id}: {m.failure or m.health.value}" for m in dead)
                raise PeerLostError(f"{reasons} (while starting; see its log)", peer=dead[0].member_id)
            lacking = missing()
            if lacking:
                self._hub.phase(step=self.progress.step, phase=f"waiting for {' and '.join(lacking)}")
            return not lacking

        await self._fleet.wait_for(
            settled,
            timeout_s=self._config.service.startup_timeout_s,
            phase="FORMING",
            missing=lambda: " and ".join(missing()),
        )

    def _ready_rollouts(self) -> list[Member]:
        members = self._fleet.fleet.usable(MemberKind.ROLLOUT)
        ready = [m for m in members if m.state in RECEIVABLE_STATES]
        # A suspect one is left out of a push while there are others; if it comes back it is a newcomer, with weights to get. The last
        # one is tried all the same: on a machine with too much to do silence is no death.
        return [m for m in ready if m.health is Health.ALIVE] or ready

    @property
    def _learner(self) -> Member:
        return self._fleet.require(MemberKind.LEARNER)[0]

    @property
    def _policy(self) -> PolicyTag:
        if self.progress.policy is None:
            raise PeerLostError("no policy is committed yet", peer="rollout")
        return self.progress.policy

    # --- telling

    async def _move(self, to: Phase) -> None:
        progress = self.progress
        phase = phases.move(progress.phase, to)
        await self._journal.record("phase", step=progress.step, source=progress.phase.value, to=phase.value)
        progress.phase, progress.phase_began = phase, time.monotonic()
        progress.admitted = progress.wanted = 0
        self._hub.phase(step=progress.step, phase=phase.value)

    def _finish_step(self, metrics: Mapping[str, float]) -> None:
        self.progress.metrics = dict(metrics)
        self._metrics_file.append(self.progress.step, metrics)
        for name, value in metrics.items():
            record(name, value)
        self._hub.step(self.progress.step, metrics)


class _Timer:
    seconds: float = 0.0


@contextmanager
def _timer() -> Iterator[_Timer]:
    timer, began = _Timer(), time.monotonic()
    yield timer
    timer.seconds = time.monotonic() - began
