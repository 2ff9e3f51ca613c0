"""FORMING: brings journal, learner, broker and cursor to the same step, after every start and every loss.

With S the last finished step of the journal and L the version that the learner holds:

    L = S       the step S + 1 goes on from the phase it was in; it was not trained, or the learner forgot it
    L = S + 1   likewise; the learner has trained it and repeats its answer
    otherwise   rewind: the steps after L are void, and the run goes on from L

A restarted learner holds the step of the newest checkpoint that verifies, or 0. A learner that holds S + 1
although the trajectories of that step are gone is sent back: it starts again, and the run rewinds. A learner
that has loaded a step which the journal does not have is sent back, too, and that checkpoint is set aside.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, NoReturn

from paceline.controller.fleet.membership import Member
from paceline.controller.fleet.supervisor import Supervisor
from paceline.controller.phases import Phase
from paceline.controller.run.parts import RunParts
from paceline.controller.run.records import checkpoints
from paceline.controller.run.records.checkpoints import ControllerState
from paceline.controller.run.records.metrics import MetricsFile
from paceline.controller.standing import Standing
from paceline.core.errors import LostDataError, PeerLostError
from paceline.core.members import LearnerState
from paceline.core.policy import PolicyTag
from paceline.data.mixture import MixtureState
from paceline.service.threads import in_thread

# A learner that is sent back may take this long to leave the fleet.
_LEAVE_S = 10.0
_ENDED = "the last controller ended in order, so the broker holds nothing of the run: mailboxes begin empty"


def goes_on(standing: Standing, version: int) -> bool:
    """Returns whether the step can go on with a learner at `version`; if not, the run is rewound."""
    current = standing.current
    if version == standing.finished:
        # The step was trained, but the learner no longer holds it: its commit, if any, is void.
        return current is None or not current.trained
    return version == standing.finished + 1


class Alignment:
    """Aligns the parts of a run.

    Attributes:
        resumed: the step that an earlier controller, or this one before a loss, had begun; None otherwise.
        saved: the state in the step's checkpoint, if the step only has to be finished.
        version: the version that the learner held.
    """

    def __init__(self, parts: RunParts, supervisor: Supervisor, metrics_file: MetricsFile) -> None:
        self._parts, self._run, self._progress = parts, parts.run, parts.progress
        self._supervisor, self._metrics_file = supervisor, metrics_file
        self._first_cursor = parts.inputs.cursor.state
        self._incarnation = ""
        self.resumed: int | None = None
        self.saved: ControllerState | None = None
        self.version = 0

    async def align(self) -> None:
        """Waits for members and aligns; afterwards the run goes on with the step after the finished one.

        Raises:
            PeerLostError: the learner was lost meanwhile, or sent back, or a member's failure is final.
            DeadlineError: a member did not come in time.
        """
        standing = self._run.journal.standing
        is_new = standing.finished < 0 and standing.current is None
        self._progress.move(Phase.FORMING)
        learner = await self._members()
        self._incarnation = learner.incarnation
        self.version = version = await self._version_of(learner)
        await self._refuse_unknown_steps(version)
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

    async def send_back(self, step: int, reason: str) -> NoReturn:
        """Makes the learner restart from its newest checkpoint, because the step cannot be finished.

        Raises:
            PeerLostError: always; the run must be aligned with the restarted learner.
        """
        learner = self._supervisor.learner
        current = self._run.journal.standing.current
        if current is not None and not current.is_lost:
            self._run.journal.record("lost", step=step, reason=reason)
        await self._parts.learner.restart(learner, reason=reason)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self._supervisor.gone(learner)
        raise PeerLostError(f"{learner.member_id} has to start again: {reason}", peer=learner.member_id)

    @property
    def learner(self) -> Member:
        """Returns the learner that the run was aligned with; raises PeerLostError if it is gone or was
        replaced."""
        learner = self._supervisor.learner
        if learner.incarnation != self._incarnation:
            raise PeerLostError(f"{learner.member_id} was started again", peer=learner.member_id)
        return learner

    async def _members(self) -> Member:
        service, supervisor = self._run.config.service, self._supervisor
        if self._run.journal.standing.finished < 0:
            await supervisor.all_ready(
                num_rollouts=self._run.config.rollout.training_servers,
                num_validators=self._run.config.rollout.validation_servers,
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
        # A learner that gets this request assumes that the group belongs to a dead controller.
        await self._parts.publication.end_group()
        return (await self._parts.learner.describe(learner)).version

    # --- the journal's side

    async def _refuse_unknown_steps(self, version: int) -> None:
        """Sends a learner back that has loaded a step which the journal does not have.

        This happens in a copy of a run's folder in which the checkpoints are newer than the journal.
        """
        standing = self._run.journal.standing
        if version <= standing.finished or version in standing.commits:
            return
        if await in_thread(checkpoints.of_step, self._run.checkpoints, self._run.id, version) is None:
            return
        await self._set_aside(standing.finished)
        await self.send_back(
            standing.finished + 1,
            f"it has loaded step {version}, and the run's journal ends with step {standing.finished}",
        )

    async def _rewind(self, version: int) -> None:
        standing = self._run.journal.standing
        state = await in_thread(self._state_at, version)
        if state is None:
            await self.send_back(
                standing.finished + 1,
                f"it holds version {version}, of which this run has no checkpoint in {self._run.checkpoints}",
            )
        cursor, guard = state
        reason = f"the learner holds version {version}, the run had finished step {standing.finished}"
        await self._set_aside(version)
        self._run.journal.record("rewind", to_step=version, reason=reason, cursor=cursor, guard=guard)
        self._run.events.notice(f"{reason}: going on from step {version}")
        await self._parts.collector.begin_anew()

    async def _set_aside(self, last_step: int) -> None:
        """Makes the checkpoints of later steps void, before the `rewind` makes the steps void.

        If the controller is killed in between, the next one rewinds the run. In the other order, such
        checkpoints would count as the newest ones of a run that does not have their steps.
        """
        void = await in_thread(checkpoints.later, self._run.checkpoints, last_step)
        for folder in void:
            self._run.journal.record("checkpoint_removed", folder=str(folder))
        await in_thread(checkpoints.set_aside, void)

    def _state_at(self, version: int) -> tuple[Any, Any] | None:
        """Returns the cursor and the guard's state at the end of a step; None if no record has them."""
        standing = self._run.journal.standing
        if version == standing.finished:
            return standing.cursor, standing.guard
        state = checkpoints.of_step(self._run.checkpoints, self._run.id, version)
        if state is not None:
            return state.cursor.to_plain(), state.guard
        return (self._first_cursor.to_plain(), {}) if version == 0 else None

    def _restore(self) -> None:
        """Sets cursor, guard, metrics and progress to the end of the finished step."""
        standing = self._run.journal.standing
        cursor = MixtureState.from_plain(standing.cursor) if standing.cursor else self._first_cursor
        self._parts.lookahead.go_to(cursor)
        self._parts.guard.restore(standing.guard)
        self._metrics_file.cut(standing.finished, standing.validations)
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
        journal = self._run.journal
        standing, step = journal.standing, journal.standing.finished + 1
        self.saved = await in_thread(self._saved, version)
        try:
            await self._parts.collector.recall(
                standing.log_position, max(0, step - 1), is_trained=version == step
            )
        except LostDataError as error:
            if standing.finished >= 0:
                reason = _ENDED if standing.after_end else str(error)
                self._note_loss(step, reason, is_trained=version == step)
            await self._parts.collector.begin_anew()
        current = standing.current
        if current is not None and current.is_lost and version == step and self.saved is None:
            await self.send_back(
                step, f"step {step} is trained but not finished, and the broker has lost its trajectories"
            )

    def _note_loss(self, step: int, reason: str, *, is_trained: bool) -> None:
        current = self._run.journal.standing.current
        is_collected_again = current is not None and current.prompts and not is_trained
        self._run.journal.record("recollect" if is_collected_again else "lost", step=step, reason=reason)

    def _saved(self, version: int) -> ControllerState | None:
        if version != self._run.journal.standing.finished + 1:
            return None
        state = checkpoints.of_step(self._run.checkpoints, self._run.id, version)
        return state if state is not None and state.metrics else None

    # --- the servers' side

    async def _serve(self, version: int) -> None:
        """Publishes the version, unless a server that outlived the controller samples from it."""
        policy, publication = self._committed(version), self._parts.publication
        if policy is not None and publication.is_served(policy) and not publication.is_outrun(policy):
            self._progress.policy = policy
        else:
            await self._parts.publication.publish(version)

    def _committed(self, version: int) -> PolicyTag | None:
        digest = self._run.journal.standing.commits.get(version)
        return PolicyTag(version=version, digest=digest) if digest is not None else None
