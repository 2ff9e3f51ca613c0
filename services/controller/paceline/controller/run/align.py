"""FORMING: brings journal, learner, broker and cursor to the same step, after every start and every loss.

With S the last finished step of the journal and L the version that the learner holds:

    L = S       the step S + 1 goes on from the phase it was in; it was not trained, or the learner forgot it
    L = S + 1   likewise; the learner has trained it and repeats its answer
    otherwise   rewind: the steps after L are void, and the run goes on from L

A learner that was restarted holds the step of the newest checkpoint that verifies, or 0.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from paceline.controller.batch.collect import Collector
from paceline.controller.batch.inputs import Inputs
from paceline.controller.fleet.clients import LearnerClient
from paceline.controller.fleet.membership import Member
from paceline.controller.fleet.supervisor import Supervisor
from paceline.controller.guard.report import Guard
from paceline.controller.phases import Phase
from paceline.controller.progress import Progress, Run
from paceline.controller.run import checkpoints
from paceline.controller.run.checkpoints import ControllerState
from paceline.controller.run.metrics import MetricsFile
from paceline.controller.run.publication import Publication
from paceline.controller.standing import Standing
from paceline.core.errors import CheckpointError, PeerLostError
from paceline.core.members import LearnerState
from paceline.core.policy import PolicyTag
from paceline.data.cursor import CursorState


def goes_on(standing: Standing, version: int) -> bool:
    """Whether the step in progress can go on with a learner at `version`; if not, the run is rewound."""
    current = standing.current
    if version == standing.finished:
        # Trained, but no longer held: its commit, if there was one, is void.
        return current is None or not current.trained
    return version == standing.finished + 1


class Alignment:
    """Aligns the parts of a run.

    Attributes:
        resumed: the step that an earlier controller, or this one before a loss, had begun; None otherwise.
        saved: the state in the checkpoint of the step in progress, where that is all that is left to finish.
    """

    def __init__(
        self,
        run: Run,
        progress: Progress,
        *,
        inputs: Inputs,
        collector: Collector,
        learner: LearnerClient,
        publication: Publication,
        supervisor: Supervisor,
        guard: Guard,
        metrics_file: MetricsFile,
    ) -> None:
        self._run, self._progress, self._inputs, self._collector = run, progress, inputs, collector
        self._learner, self._publication, self._supervisor = learner, publication, supervisor
        self._guard, self._metrics_file = guard, metrics_file
        self._first_cursor = inputs.cursor.state
        self._incarnation = ""
        self.resumed: int | None = None
        self.saved: ControllerState | None = None

    async def align(self) -> None:
        """Waits for members and aligns; afterwards the run goes on with the step after the finished one.

        Raises:
            PeerLostError: the learner was lost meanwhile, or a member's failure is final.
            DeadlineError: a member did not come in time.
            CheckpointError: the learner's version cannot be gone on from.
        """
        standing = self._run.journal.standing
        is_new = standing.finished < 0 and standing.current is None
        self._progress.move(Phase.FORMING)
        learner = await self._members()
        self._incarnation = learner.incarnation
        version = await self._version_of(learner)
        if not goes_on(standing, version):
            await self._rewind(version)
        self._restore()
        if not is_new:
            self._note_resume()
        await self._recall(version)
        if version == standing.finished:
            await self._serve(version)
        elif standing.finished >= 0:
            self._progress.policy = self._committed(standing.finished)

    @property
    def learner(self) -> Member:
        """The learner that the run was aligned with; raises PeerLostError where it is another or gone."""
        learner = self._supervisor.learner
        if learner.incarnation != self._incarnation:
            raise PeerLostError(f"{learner.member_id} was started again", peer=learner.member_id)
        return learner

    async def _members(self) -> Member:
        service, supervisor = self._run.config.service, self._supervisor
        if self._run.journal.standing.finished < 0:
            await supervisor.all_ready(
                num_rollouts=self._run.config.rollout.replicas,
                step=self._progress.step,
                timeout_s=service.startup_timeout_s,
            )
            return supervisor.learner
        await supervisor.reward_ready(service.recovery_timeout_s)
        await supervisor.rollouts_ready(service.recovery_timeout_s)
        return await supervisor.learner_ready(service.recovery_timeout_s)

    async def _version_of(self, learner: Member) -> int:
        # While it trains, the learner answers no question; it still holds the version that it reported.
        if learner.state is LearnerState.TRAINING and learner.policy is not None:
            return learner.policy.version
        # A learner that is asked takes the group for one of a controller that has died.
        await self._publication.end_group()
        return (await self._learner.describe(learner)).version

    # --- the journal's side

    async def _rewind(self, version: int) -> None:
        standing = self._run.journal.standing
        cursor, guard = self._state_at(version)
        reason = f"the learner holds version {version}, the run had finished step {standing.finished}"
        self._run.journal.record("rewind", to_step=version, reason=reason, cursor=cursor, guard=guard)
        self._run.events.notice(f"{reason}: going on from step {version}")
        for folder in checkpoints.set_aside(self._run.checkpoints, version):
            self._run.journal.record("checkpoint_removed", folder=str(folder))
        await self._collector.begin_anew()

    def _state_at(self, version: int) -> tuple[Any, Any]:
        """Cursor and guard at the end of a step."""
        standing = self._run.journal.standing
        if version == standing.finished:
            return standing.cursor, standing.guard
        state = checkpoints.of_step(self._run.checkpoints, self._run.id, version)
        if state is not None:
            return asdict(state.cursor), state.guard
        if version == 0:
            return asdict(self._first_cursor), {}
        raise CheckpointError(
            f"the learner holds version {version}, of which this run has no checkpoint in "
            f"{self._run.checkpoints}; "
            "start the learner again, so that it loads one"
        )

    def _restore(self) -> None:
        """Sets cursor, guard, metrics and progress to the end of the finished step."""
        standing = self._run.journal.standing
        cursor = CursorState(**standing.cursor) if standing.cursor else self._first_cursor
        self._inputs.cursor.restore(cursor)
        self._guard.restore(standing.guard)
        self._metrics_file.cut(standing.finished)
        self._progress.step = max(0, standing.finished)

    def _note_resume(self) -> None:
        standing = self._run.journal.standing
        current = standing.current
        self.resumed = None if current is None else current.step
        self._run.journal.record(
            "resume", step=standing.finished + 1, phase="" if current is None else current.phase
        )

    # --- the broker's side

    async def _recall(self, version: int) -> None:
        journal, step = self._run.journal, self._run.journal.standing.finished + 1
        is_there = await self._collector.recall(journal.standing.log_position, max(0, step - 1))
        self.saved = self._saved(version)
        if is_there:
            return
        current = journal.standing.current
        if current is None or not current.prompts or self.saved is not None:
            journal.record("log", step=step, position=self._collector.position)
        elif version == step:
            raise CheckpointError(
                f"step {step} is trained but not finished, and the broker has lost its trajectories; start "
                "the learner again, so that it loads the newest checkpoint"
            )
        else:
            journal.record("recollect", step=step, reason="the broker lost the run's data")

    def _saved(self, version: int) -> ControllerState | None:
        if version != self._run.journal.standing.finished + 1:
            return None
        state = checkpoints.of_step(self._run.checkpoints, self._run.id, version)
        return state if state is not None and state.metrics else None

    # --- the servers' side

    async def _serve(self, version: int) -> None:
        """Publishes the version, unless a server that outlived the controller samples from it."""
        policy = self._committed(version)
        if policy is not None and self._publication.is_served(policy):
            self._progress.policy = policy
        else:
            await self._publication.publish(version)

    def _committed(self, version: int) -> PolicyTag | None:
        digest = self._run.journal.standing.commits.get(version)
        return PolicyTag(version=version, digest=digest) if digest is not None else None
