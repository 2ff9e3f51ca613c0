"""Membership epochs: the weight group of the learner and some rollout servers, and calls to all its members.

    describe all -> one spec -> all join at once -> epoch e

A server that does not join is expelled from the fleet, and the rest form the next epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from paceline.config.run import RunConfig
from paceline.controller.fleet.clients import Gone, LearnerClient, LearnerWeights, RolloutClient, while_alive
from paceline.controller.fleet.membership import Member
from paceline.controller.weights import blame
from paceline.core.errors import PacelineError, PeerLostError
from paceline.weights.geometry.layout import RankLayout
from paceline.weights.plan.backend import choose_wire
from paceline.weights.plan.fit import misfit
from paceline.weights.plan.spec import WeightGroupSpec

T = TypeVar("T")
Expel = Callable[[Member, str], Coroutine[Any, Any, None]]

_NUMBERS_PER_TERM: Final = 1_000_000
_MOST_UNEXPLAINED: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """Holds a weight group that has formed.

    Attributes:
        owners: the server to which each rollout rank belongs.
        num_gpus: number of GPUs of its ranks; 0 on CPUs.
    """

    number: int
    learner: Member
    rollouts: tuple[Member, ...]
    owners: tuple[Member, ...]
    num_gpus: int = 0


class Epochs:
    """Forms and dissolves epochs; there is at most one at a time.

    Args:
        expel: removes a member from the fleet for good and journals the reason.
        gone: returns when a member is no longer in the fleet.
        term: the controller's term; later terms have greater epoch numbers, so that no number is used twice
            in the learner's rendezvous store.
    """

    def __init__(
        self,
        config: RunConfig,
        learner: LearnerClient,
        rollout: RolloutClient,
        expel: Expel,
        gone: Gone,
        *,
        term: int,
    ) -> None:
        self._config, self._learner, self._rollout = config, learner, rollout
        self.expel, self.gone = expel, gone
        self.current: Epoch | None = None
        self._last_number = term * _NUMBERS_PER_TERM
        self._unexplained = 0

    def fits(self, learner: Member, rollouts: Sequence[Member]) -> bool:
        """Returns whether the current epoch is of exactly these members, as they are registered now."""
        if self.current is None:
            return False
        own, others = (self.current.learner, *self.current.rollouts), (learner, *rollouts)
        return len(own) == len(others) and all(a is b for a, b in zip(own, others, strict=True))

    async def form(self, learner: Member, rollouts: Sequence[Member]) -> int:
        """Dissolves the current epoch and forms a new one; returns the version that the learner holds.

        Servers of the dissolved epoch that are not in the new one go on sampling: leaving a group touches no
        parameter. So newcomers get their weights in an epoch of their own while the others work.

        Raises:
            PeerLostError: the learner is gone, or no rollout server is left; with the reason if the last ones
                were expelled because they run another model.
            DeadlineError: the learner did not join in time.
        """
        await self.dissolve()
        misfits: dict[str, str] = {}
        while rollouts:
            weights = await self._learner.describe(learner)
            layouts = await self.call_each(rollouts, self._rollout.describe)
            misfits |= await self._expel_misfits(rollouts, weights, layouts)
            if all(member.usable for member in rollouts):
                if await self._all_join(learner, rollouts, weights, layouts):
                    return weights.version
                await self.dissolve()
            rollouts = [m for m in rollouts if m.usable]
        reasons = "".join(f"{member_id}: {reason}. " for member_id, reason in misfits.items())
        raise PeerLostError(
            f"{reasons}No rollout server is left to hold the weights; start one, or raise rollout.replicas",
            peer="rollout",
        )

    async def dissolve(self) -> None:
        """Makes all members of the current epoch that still answer leave it."""
        epoch, self.current = self.current, None
        if epoch is None:
            return
        calls = [self._rollout.leave(m, epoch=epoch.number) for m in epoch.rollouts if m.usable]
        outcomes = await asyncio.gather(
            self._learner.leave(epoch.learner, epoch=epoch.number), *calls, return_exceptions=True
        )
        if isinstance(outcomes[0], BaseException) and epoch.learner.usable:
            raise outcomes[0]

    async def _all_join(
        self,
        learner: Member,
        rollouts: Sequence[Member],
        weights: LearnerWeights,
        layouts: dict[str, tuple[RankLayout, ...]],
    ) -> bool:
        """Returns whether all members joined; if not, a rollout server failed and is expelled.

        Raises:
            PeerLostError, DeadlineError, WeightSyncError: the learner's side failed.
        """
        self._last_number += 1
        owners = tuple(member for member in rollouts for _ in layouts[member.member_id])
        rollout_layouts = [layout for member in rollouts for layout in layouts[member.member_id]]
        gpus = {
            place.gpu for place in (*weights.layouts.places, *(layout.place for layout in rollout_layouts))
        }
        self.current = epoch = Epoch(
            number=self._last_number,
            learner=learner,
            rollouts=tuple(rollouts),
            owners=owners,
            num_gpus=len(gpus - {""}),
        )
        spec = self._spec(epoch, weights, rollout_layouts).to_bytes()

        async def join(member: Member) -> bool:
            offset = len(weights.layouts) + owners.index(member)
            joining = self._rollout.join(member, epoch=epoch.number, spec=spec, rank_offset=offset)
            await self.call_jointly(epoch, member, joining)
            return True

        joining = asyncio.create_task(
            self.call_jointly(epoch, learner, self._learner.join(learner, epoch=epoch.number, spec=spec)),
            name="join learner",
        )
        joined = await self.call_each(rollouts, join, beside=joining)
        error = joining.exception()
        if error is not None and (len(joined) == len(rollouts) or blame.is_own_failure(learner, error)):
            raise error
        return error is None and len(joined) == len(rollouts)

    async def _expel_misfits(
        self, members: Sequence[Member], weights: LearnerWeights, layouts: dict[str, tuple[RankLayout, ...]]
    ) -> dict[str, str]:
        """Expels the servers that do not run the learner's model; returns the reasons by member id."""
        reasons: dict[str, str] = {}
        for member in members:
            if member.member_id in layouts:
                difference = misfit(weights.layouts, layouts[member.member_id], self._config.model.dtype)
                if difference is not None:
                    reasons[member.member_id] = f"it does not run the learner's model: {difference}"
                    await self.expel(member, f"ModelError: {reasons[member.member_id]}")
        return reasons

    def _spec(
        self, epoch: Epoch, weights: LearnerWeights, rollout_layouts: Sequence[RankLayout]
    ) -> WeightGroupSpec:
        wire = choose_wire(self._config.weights.backend, weights.layouts, rollout_layouts)
        return WeightGroupSpec(
            epoch=epoch.number,
            backend=wire.backend,
            shared=wire.shared,
            store_host=weights.store_host,
            store_port=weights.store_port,
            learner_layouts=weights.layouts,
            rollout_layouts=tuple(rollout_layouts),
            wire_dtype=self._config.model.dtype,
            round_bytes=self._config.weights.staging_mib << 19,
            relay=self._config.weights.relay,
            timeout_s=self._config.weights.join_timeout_s,
        )

    async def call_each(
        self,
        members: Sequence[Member],
        act: Callable[[Member], Coroutine[Any, Any, T]],
        *,
        beside: asyncio.Task[Any] | None = None,
    ) -> dict[str, T]:
        """Calls all members at once and waits for them and for the learner's call `beside`.

        Members at fault for a failure are expelled. Returns results by member id, without failed members.
        """
        outcomes = await asyncio.gather(*(act(m) for m in members), return_exceptions=True)
        if beside is not None:
            await asyncio.wait([beside])
        results: dict[str, T] = {}
        failures: list[blame.Failure] = []
        for member, outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, PacelineError):
                failures.append((member, outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                results[member.member_id] = outcome
        epoch, learner_error = self.current, beside.exception() if beside else None
        if epoch is not None and learner_error and blame.is_own_failure(epoch.learner, learner_error):
            return results
        owners = epoch.owners if epoch is not None else ()
        for member, error in self._to_expel(failures, learner_error, owners):
            await self.expel(member, f"{type(error).__name__}: {error}")
        return results

    def _to_expel(
        self, failures: list[blame.Failure], learner_error: BaseException | None, owners: Sequence[Member]
    ) -> list[blame.Failure]:
        """Returns the failures of the servers at fault; none if only another attempt can show which they are.

        The second time in a row, all failed servers are expelled, because attempts must end at some point.
        """
        if not failures:
            return []
        faults = blame.at_fault(failures, learner_error, owners)
        self._unexplained = 0 if faults else self._unexplained + 1
        if self._unexplained < _MOST_UNEXPLAINED:
            return faults
        self._unexplained = 0
        return failures

    def succeeded(self) -> None:
        """Notes that a push has reached every server of the epoch, so that earlier failures no longer
        count."""
        self._unexplained = 0

    async def call_jointly(self, epoch: Epoch, member: Member, call: Coroutine[Any, Any, T]) -> T:
        """Awaits a call that every member of the epoch must answer; tells the others if this member fails.

        NCCL reports no error for a lost peer: without being told, the others would wait until the deadline.
        """
        try:
            return await while_alive(member, call, self.gone)
        except PacelineError as error:
            if blame.is_own_failure(member, error):
                # If the learner does not answer, its own call reports that.
                with contextlib.suppress(PacelineError):
                    await self._learner.abandon(epoch.learner, epoch=epoch.number, lost=member.member_id)
            raise
