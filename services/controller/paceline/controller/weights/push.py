"""Weights from learner to rollout servers: membership epochs, pushes, and the commit.

    form:     describe all -> one spec -> all join at once -> epoch e
    transfer: learner publishes while every server of the epoch receives -> digests compared -> candidate
    commit:   candidate -> its servers sample the new version

A server that fails in either is put out of the fleet; the rest form a new epoch and go on. A member that gives up cuts all of its
connections, so that failures spread: who only reports that another went away is not to blame. Nobody serves a version whose digests
were not compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paceline.config.run import RunConfig
from paceline.controller.fleet.clients import LearnerWeights, Peers
from paceline.controller.fleet.membership import Member
from paceline.controller.weights import blame
from paceline.core.errors import PacelineError, PeerLostError, WeightSyncError
from paceline.core.policy import PolicyTag
from paceline.weights.digest.agreement import disagreement, format_digest, model_digest
from paceline.weights.geometry.layout import RankLayout
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.receipt import PushReceipt

T = TypeVar("T")
Expel = Callable[[Member, str], Coroutine[Any, Any, None]]
Gone = Callable[[Member], Coroutine[Any, Any, None]]


@dataclass(kw_only=True, slots=True)
class Epoch:
    """A formed weight group: its number, who is in it, and whose each rollout rank is."""

    number: int
    learner: Member
    rollouts: list[Member] = field(default_factory=list)
    owners: list[Member] = field(default_factory=list)

    def holds(self, learner: Member, rollouts: list[Member]) -> bool:
        """Whether it is made of exactly these incarnations."""
        mine = [(m.member_id, m.incarnation) for m in [self.learner, *self.rollouts]]
        return mine == [(m.member_id, m.incarnation) for m in [learner, *rollouts]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A version that was pushed and compared, but that nobody serves yet.

    Attributes:
        servers: those that hold the learner's digest.
        began: monotonic time at which the push began.
        metrics: those of the transfer.
    """

    policy: PolicyTag
    servers: tuple[Member, ...]
    began: float
    metrics: dict[str, float]


class WeightPush:
    """Owns the membership epoch.

    Args:
        expel: puts a member out of the fleet, with the reason, in the journal and for good.
        gone: returns when a member is out of the fleet, for whatever reason.
    """

    def __init__(self, config: RunConfig, peers: Peers, expel: Expel, gone: Gone) -> None:
        self._config, self._peers, self._expel, self._gone = config, peers, expel, gone
        self._epoch: Epoch | None = None
        self._last_number = 0

    def fits(self, learner: Member, rollouts: list[Member]) -> bool:
        """Whether the group in being is made of exactly these members."""
        return self._epoch is not None and self._epoch.holds(learner, rollouts)

    async def form(self, learner: Member, rollouts: list[Member]) -> int:
        """Forms a new epoch of `learner` and `rollouts`, letting go of the old one; returns the version that the learner holds.

        Raises:
            PeerLostError: the learner is gone, or no rollout server is left.
            DeadlineError: the learner did not come in time.
        """
        await self.dissolve()
        while rollouts:
            weights = await self._peers.learner_weights(learner)
            layouts = await self._each(rollouts, self._peers.rollout_layouts)
            if len(layouts) == len(rollouts):
                if await self._all_join(learner, rollouts, weights, layouts):
                    return weights.version
                await self.dissolve()
            rollouts = [m for m in rollouts if m.usable]
        raise PeerLostError(
            "no rollout server is left to hold the weights; start one, or raise rollout.replicas",
            peer="rollout",
        )

    async def _all_join(
        self,
        learner: Member,
        rollouts: list[Member],
        weights: LearnerWeights,
        layouts: dict[str, tuple[RankLayout, ...]],
    ) -> bool:
        """Whether all came. False: a rollout server did not, and is out of the fleet.

        Raises:
            PeerLostError, DeadlineError, WeightSyncError: the learner's side failed.
        """
        self._last_number += 1
        spec = WeightGroupSpec(
            epoch=self._last_number,
            backend=self._config.weight_backend(weights.device),
            store_host=weights.store_host,
            store_port=weights.store_port,
            learner_layouts=weights.layouts,
            rollout_layouts=tuple(layout for member in rollouts for layout in layouts[member.member_id]),
            wire_dtype=self._config.model.dtype,
            round_bytes=self._config.weights.staging_mib << 19,
            relay=self._config.weights.relay,
            timeout_s=self._config.weights.join_timeout_s,
        )
        packed = spec.to_bytes()
        owners = [member for member in rollouts for _ in layouts[member.member_id]]
        self._epoch = epoch = Epoch(
            number=self._last_number, learner=learner, rollouts=list(rollouts), owners=owners
        )

        async def join(member: Member) -> bool:
            offset = len(weights.layouts) + owners.index(member)
            joining = self._peers.join_rollout(member, epoch=epoch.number, spec=packed, rank_offset=offset)
            await self._awaited_by_others(epoch, member, joining)
            return True

        joining = asyncio.create_task(
            self._peers.join_learner(learner, epoch=epoch.number, spec=packed), name="join learner"
        )
        joined = await self._each(rollouts, join, beside=joining)
        outcome = joining.exception()
        if outcome is not None and (len(joined) == len(rollouts) or blame.is_learner_lost(learner, outcome)):
            raise outcome
        return outcome is None and len(joined) == len(rollouts)

    async def transfer(self, version: int) -> Candidate | None:
        """Sends `version` to every server of the epoch in being and compares digests; no server serves it yet.

        A server whose digest differs from the learner's is put out of the fleet, with what differs. Returns None where a server was
        lost on the way: the epoch is gone, form another and transfer again.

        Raises:
            PeerLostError, DeadlineError: the learner's side failed.
            WeightSyncError: no group is formed, or no server holds what the learner sent.
        """
        epoch = self._epoch
        if epoch is None:
            raise WeightSyncError("no weight group is formed; a push needs one")
        began = time.monotonic()

        async def receive(member: Member) -> PushReceipt:
            receiving = self._peers.receive(member, epoch=epoch.number, version=version)
            return await self._awaited_by_others(epoch, member, receiving)

        sending = asyncio.create_task(
            self._peers.publish(epoch.learner, epoch=epoch.number, version=version), name="publish weights"
        )
        received = await self._each(epoch.rollouts, receive, beside=sending)
        failure = sending.exception()
        if len(received) < len(epoch.rollouts) and not (
            failure and blame.is_learner_lost(epoch.learner, failure)
        ):
            await self.dissolve()
            return None
        sent = sending.result()
        return Candidate(
            policy=PolicyTag(version=version, digest=format_digest(model_digest(sent.reports))),
            servers=await self._agreeing(epoch.rollouts, sent, received),
            began=began,
            metrics=_metrics(sent, received.values()),
        )

    async def _agreeing(
        self, members: list[Member], sent: PushReceipt, received: dict[str, PushReceipt]
    ) -> tuple[Member, ...]:
        """The servers that hold what the learner sent; the others are expelled, unless there are only others."""
        differences: dict[str, str] = {}
        for member in members:
            difference = disagreement(sent.reports[0], received[member.member_id].reports)
            if difference is not None:
                differences[member.member_id] = difference
        if len(differences) == len(members):
            raise WeightSyncError(next(iter(differences.values())))
        for member in members:
            if member.member_id in differences:
                await self._expel(member, f"WeightSyncError: {differences[member.member_id]}")
        return tuple(member for member in members if member.member_id not in differences)

    async def commit(self, candidate: Candidate) -> dict[str, float]:
        """Makes the candidate the policy of its servers, which sample from then on; returns the metrics of `weights/`.

        Raises:
            PeerLostError: no server committed.
        """
        opened: list[float] = []

        async def commit(member: Member) -> bool:
            await self._while_alive(member, self._peers.commit(member, candidate.policy))
            opened.append(time.monotonic())
            return True

        if not await self._each(candidate.servers, commit):
            raise PeerLostError("no rollout server committed the new weights; none is left", peer="rollout")
        return {
            **candidate.metrics,
            "weights/first_open_ms": (min(opened) - candidate.began) * 1e3,
            "weights/pause_ms": (time.monotonic() - candidate.began) * 1e3,
        }

    async def _awaited_by_others(self, epoch: Epoch, member: Member, call: Coroutine[Any, Any, T]) -> T:
        """What a call returns that all members of the epoch have to answer together. Where it fails by this one's doing the others are
        told: over NCCL they would not notice, and wait until the deadline."""
        try:
            return await self._while_alive(member, call)
        except PacelineError as error:
            if blame.is_own_failure(member, error):
                # Where the learner does not answer, its own call says so.
                with contextlib.suppress(PacelineError):
                    await self._peers.abandon_push(epoch.learner, epoch=epoch.number, lost=member.member_id)
            raise

    async def _while_alive(self, member: Member, call: Coroutine[Any, Any, T]) -> T:
        """What a call to a member returns; PeerLostError as soon as the member is out of the fleet: a machine that froze keeps its
        connections, and only its silence tells."""
        calling, leaving = asyncio.create_task(call), asyncio.create_task(self._gone(member))
        try:
            await asyncio.wait([calling, leaving], return_when=asyncio.FIRST_COMPLETED)
            if calling.done():
                return calling.result()
            raise PeerLostError(f"{member.member_id} is gone: {member.failure}", peer=member.member_id)
        finally:
            calling.cancel()
            leaving.cancel()
            await asyncio.gather(calling, leaving, return_exceptions=True)

    async def dissolve(self) -> None:
        """Lets go of the epoch in being, as far as its members still answer."""
        epoch, self._epoch = self._epoch, None
        if epoch is None:
            return
        calls = [self._peers.leave_rollout(m, epoch=epoch.number) for m in epoch.rollouts if m.usable]
        outcomes = await asyncio.gather(
            self._peers.leave_learner(epoch.learner, epoch=epoch.number), *calls, return_exceptions=True
        )
        if isinstance(outcomes[0], BaseException):
            raise outcomes[0]

    async def _each(
        self,
        members: Sequence[Member],
        act: Callable[[Member], Coroutine[Any, Any, T]],
        *,
        beside: asyncio.Task[Any] | None = None,
    ) -> dict[str, T]:
        """Calls all at once and waits for them and for what the learner does `beside`; who is to blame for a failure is expelled.

        Returns results by member id, in the members' order, without those that failed.
        """
        outcomes = await asyncio.gather(*(act(m) for m in members), return_exceptions=True)
        if beside is not None:
            await asyncio.wait([beside])
        good: dict[str, T] = {}
        failures: list[blame.Failure] = []
        for member, outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, PacelineError):
                failures.append((member, outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                good[member.member_id] = outcome
        learner_error = beside.exception() if beside else None
        epoch = self._epoch
        if epoch is not None and learner_error and blame.is_learner_lost(epoch.learner, learner_error):
            return good
        owners = epoch.owners if epoch is not None else []
        for member, error in blame.at_fault(failures, learner_error, owners):
            await self._expel(member, f"{type(error).__name__}: {error}")
        return good


def _metrics(sent: PushReceipt, received: Iterable[PushReceipt]) -> dict[str, float]:
    """`weights/bytes` is what leaves the learners, `relayed_bytes` what rollout ranks pass on to each other.

    Times and `peak_extra_bytes`, the staging, are those of the rank with most.
    """
    merged = PushReceipt.merge([sent, *received])
    return {
        "weights/bytes": float(sent.num_bytes),
        "weights/relayed_bytes": float(merged.relayed_bytes),
        "weights/peak_extra_bytes": float(merged.peak_extra_bytes),
        "weights/transfer_ms": merged.transfer_ms,
        "weights/digest_ms": merged.digest_ms,
    }
