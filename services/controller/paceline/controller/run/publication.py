"""PUBLISH and COMMIT: brings a version from the learner to all servers, or to newcomers during a collection.

    weight group -> transfer -> digests compared -> commit in the journal -> servers sample

A version is committed with one digest. A newcomer is a usable server that lacks the committed policy, because
it has joined late or was restarted. A validation server that answers held-out prompts keeps its weights and
takes no part in pushes meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from paceline.controller.fleet.clients import LearnerClient
from paceline.controller.fleet.membership import Member
from paceline.controller.fleet.supervisor import Supervisor
from paceline.controller.fleet.turns import Turn, Turns
from paceline.controller.phases import Phase
from paceline.controller.progress import Progress, Run
from paceline.controller.weights.push import Candidate, WeightPush
from paceline.core.errors import DeadlineError, PacelineError, PeerLostError, WeightSyncError
from paceline.core.members import LearnerState, RolloutState
from paceline.core.policy import PolicyTag
from paceline.service.observability.telemetry import span
from paceline.service.tasks import wait_at_most

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_PAUSE_S = 5.0
# A push to newcomers may go on for this long after the barrier has closed.
_GRACE_S = 2.0
# After that, calling the push off may take this long.
_CALL_OFF_S = 5.0
# A server reports its state within a heartbeat of the commit.
_REPORT_S = 5.0

T = TypeVar("T")


class StaleLearnerError(PeerLostError):
    """The learner was restarted, and holds an earlier version than the one that must be sent."""

    def __init__(self, learner: Member, version: int, wanted: int) -> None:
        super().__init__(
            f"the learner holds version {version}, not {wanted}: it was restarted", peer=learner.member_id
        )


class Publication:
    """Brings versions to the rollout servers.

    Attributes:
        validated: the policy whose validation is under way on validation servers; None if there is none.
    """

    def __init__(
        self,
        run: Run,
        progress: Progress,
        push: WeightPush,
        learner: LearnerClient,
        supervisor: Supervisor,
        turns: Turns,
    ) -> None:
        self._turns = turns
        self._run, self._progress, self._push = run, progress, push
        self._learner, self._supervisor = learner, supervisor
        self._committed: dict[tuple[str, str], tuple[PolicyTag, float]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.validated: PolicyTag | None = None

    async def publish(self, version: int) -> dict[str, float]:
        """Carries out PUBLISH and COMMIT; forms a new weight group if the current one does not fit the fleet.

        Raises:
            PeerLostError: the learner is lost or holds another version, or no rollout server is left.
            WeightSyncError: the weights are not those that were committed as this version.
        """
        while True:
            await self._turns.take(Turn.PUSH)
            await self._ensure_epoch(version)
            self._progress.move(Phase.PUBLISH)
            with span("publish", attributes={"paceline.version": version}):
                candidate = await self._push.transfer(version)
            if candidate is not None:
                break
        self._check_digest(candidate.policy)
        self._run.journal.record(
            "commit",
            version=version,
            digest=candidate.policy.digest,
            servers=[member.member_id for member in candidate.servers],
        )
        self._progress.move(Phase.COMMIT)
        await self._turns.take(Turn.ROLLOUT)
        with span("commit", attributes={"paceline.version": version}):
            metrics = await self._push.commit(candidate)
        self._progress.policy = candidate.policy
        self._committed.clear()
        self._note_commit(candidate)
        return metrics

    def is_served(self, policy: PolicyTag) -> bool:
        """Returns whether any server can sample training prompts from exactly this policy; servers may
        outlive a controller."""
        return any(self._has(member, policy) for member in self._supervisor.rollouts)

    def is_held_for_validation(self, policy: PolicyTag) -> bool:
        """Returns whether a validation server has exactly this policy."""
        return any(self._has(member, policy) for member in self._supervisor.validators)

    def is_outrun(self, policy: PolicyTag) -> bool:
        """Returns whether a server samples from a newer version, such as one that a rewind has made void."""
        servers = [*self._supervisor.rollouts, *self._idle_validators]
        versions = [m.policy.version for m in servers if m.policy is not None]
        return max(versions, default=policy.version) > policy.version

    async def to_newcomers(self, policy: PolicyTag, collection: Coroutine[Any, Any, T]) -> T:
        """Awaits `collection` in the servers' turn; meanwhile newcomers get `policy`.

        A push that outlasts the collection is called off.

        Raises:
            StaleLearnerError: there is a newcomer, but the learner was restarted and no longer holds the
                policy.
            PeerLostError, DeadlineError: the learner does not give up its turn.
        """
        try:
            await self._turns.take(Turn.ROLLOUT)
        except BaseException:
            collection.close()
            raise
        serving = asyncio.create_task(self._serve_newcomers(policy), name="newcomers")
        collecting = asyncio.create_task(collection, name="collection")
        try:
            await asyncio.wait([serving, collecting], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            return await collecting
        finally:
            collecting.cancel()
            await asyncio.wait([collecting])
            await self._call_off(serving)

    # --- weight group

    async def end_group(self) -> None:
        """Makes all members leave the weight group, if there is one; the next push forms another."""
        await self._push.epochs.dissolve()

    async def _ensure_epoch(self, version: int) -> None:
        learner = self._supervisor.learner
        rollouts = self._supervisor.rollouts
        if not rollouts:
            rollouts = await self._supervisor.rollouts_ready(self._run.config.service.recovery_timeout_s)
        rollouts = [*rollouts, *self._idle_validators]
        if self._push.epochs.fits(learner, rollouts):
            return
        if self._progress.phase is not Phase.FORMING:
            self._progress.move(Phase.FORMING)
        await self._form(learner, rollouts, version)

    @property
    def _idle_validators(self) -> list[Member]:
        """The validation servers that may take other weights."""
        kept = self.validated
        validations = self._run.journal.standing.validations
        if kept is None or validations.get(kept.version) != str(kept):
            # There is none, or a rewind has made it void.
            return self._supervisor.validators
        return [m for m in self._supervisor.validators if not self._has(m, kept)]

    async def _form(self, learner: Member, rollouts: Sequence[Member], version: int) -> None:
        if learner.state is LearnerState.LOADING:
            raise PeerLostError(
                f"{learner.member_id} was started again and is still loading", peer=learner.member_id
            )
        learner_version = await self._push.epochs.form(learner, rollouts)
        epoch = self._push.epochs.current
        if epoch is not None:
            members = [m.member_id for m in (epoch.learner, *epoch.rollouts)]
            self._run.journal.record("epoch", number=epoch.number, members=members)
        if learner_version != version:
            raise StaleLearnerError(learner, learner_version, version)

    def _check_digest(self, policy: PolicyTag) -> None:
        committed = self._run.journal.standing.commits.get(policy.version)
        if committed is not None and committed != policy.digest:
            raise WeightSyncError(
                f"version {policy.version} was committed with digest {committed}; the learner now holds "
                f"{policy.digest} under that version. The run cannot go on from it: restore the checkpoints "
                "of this run, or set trainer.resume: never"
            )

    # --- newcomers

    async def _serve_newcomers(self, policy: PolicyTag) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            # Validation servers get weights here only to validate this policy. Otherwise they get them in
            # the next push, with all servers.
            helpers = self._supervisor.validators if self.validated == policy else []
            servers = [*self._supervisor.rollouts, *helpers]
            newcomers = [m for m in servers if not self._has(m, policy)]
            if not newcomers:
                continue
            try:
                await self._push_to(newcomers, policy)
            except StaleLearnerError:
                # No server can get the policy any more, and this learner cannot train on its samples.
                raise
            except (PeerLostError, DeadlineError, WeightSyncError) as error:
                names = ", ".join(m.member_id for m in newcomers)
                log.warning("newcomers (%s) did not get %s: %s", names, policy, error)
                await asyncio.sleep(_PAUSE_S)

    def _has(self, member: Member, policy: PolicyTag) -> bool:
        if member.policy == policy and member.state is RolloutState.SERVING:
            return True
        committed, since = self._committed.get((member.member_id, member.incarnation), (None, 0.0))
        return committed == policy and time.monotonic() - since < _REPORT_S

    async def _push_to(self, newcomers: Sequence[Member], policy: PolicyTag) -> None:
        # Stays cleared if this task is cancelled: `_call_off` then frees the learner.
        self._idle.clear()
        try:
            servers = await self._transfer_to(newcomers, policy)
        except PacelineError:
            self._idle.set()
            raise
        self._idle.set()
        if servers:
            self._run.journal.record("newcomers", version=policy.version, servers=servers)

    async def _transfer_to(self, newcomers: Sequence[Member], policy: PolicyTag) -> list[str]:
        await self._turns.wake(newcomers)
        await self._form(self._supervisor.learner, newcomers, policy.version)
        try:
            candidate = await self._push.transfer(policy.version)
        except WeightSyncError as error:
            # None of the servers holds the weights that the learner sent.
            for member in newcomers:
                await self._supervisor.expel(member, f"WeightSyncError: {error}")
            raise
        if candidate is None:
            return []
        self._check_digest(candidate.policy)
        await self._push.commit(candidate)
        self._note_commit(candidate)
        return [member.member_id for member in candidate.servers]

    def _note_commit(self, candidate: Candidate) -> None:
        noted = (candidate.policy, time.monotonic())
        self._committed |= {(m.member_id, m.incarnation): noted for m in candidate.servers}

    async def _call_off(self, serving: asyncio.Task[None]) -> None:
        """Ends the task; a push under way is finished within seconds or abandoned."""
        await wait_at_most(self._idle, _GRACE_S)
        serving.cancel()
        await asyncio.wait([serving])
        epoch = self._push.epochs.current
        if not self._idle.is_set() and epoch is not None:
            # The learner is free after the first call; the second may wait for a newcomer that hangs.
            with contextlib.suppress(PacelineError, TimeoutError):
                async with asyncio.timeout(_CALL_OFF_S):
                    lost = epoch.rollouts[0].member_id
                    await self._learner.abandon(epoch.learner, epoch=epoch.number, lost=lost)
                    await self._push.epochs.dissolve()
        self._idle.set()
        if not serving.cancelled():
            serving.result()
