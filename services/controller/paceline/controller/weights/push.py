"""A push of one version: transfer to all servers of the epoch, compare digests, commit.

    transfer: learner publishes while every server receives -> digests compared -> candidate
    commit:   candidate -> its servers sample the new version

A server that fails in either part is expelled; after a failed transfer the other members form a new epoch.
No server samples from a version whose digests were not compared.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.controller.fleet.clients import LearnerClient, RolloutClient, while_alive
from paceline.controller.fleet.membership import Member
from paceline.controller.weights import blame
from paceline.controller.weights.epoch import Epochs
from paceline.core.errors import PeerLostError, WeightSyncError
from paceline.core.policy import PolicyTag
from paceline.service.observability import metrics, telemetry
from paceline.weights.digest.agreement import disagreement, format_digest, model_digest
from paceline.weights.receipt import PushReceipt


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A version that was transferred and compared, but that no server samples from yet.

    Attributes:
        servers: the servers whose digest equals the learner's.
        began: monotonic time at which the push began.
    """

    policy: PolicyTag
    servers: tuple[Member, ...]
    began: float
    metrics: Mapping[str, float]


class WeightPush:
    """Pushes versions over the current one of `epochs`."""

    def __init__(self, epochs: Epochs, learner: LearnerClient, rollout: RolloutClient) -> None:
        self.epochs, self._learner, self._rollout = epochs, learner, rollout

    async def transfer(self, version: int) -> Candidate | None:
        """Sends `version` to every server of the current epoch and compares digests.

        A server whose digest differs from the learner's is expelled, and the reason says what differs.
        Returns None if a server was lost during the transfer: the epoch is dissolved then; form another and
        transfer again.

        Raises:
            PeerLostError, DeadlineError: the learner's side failed.
            WeightSyncError: no epoch is formed, or no server holds what the learner sent.
        """
        epoch = self.epochs.current
        if epoch is None:
            raise WeightSyncError("no weight group is formed; a push needs one")
        began = time.monotonic()

        async def receive(member: Member) -> PushReceipt:
            receiving = self._rollout.receive(member, epoch=epoch.number, version=version)
            return await self.epochs.call_jointly(epoch, member, receiving)

        publishing = self._learner.publish(epoch.learner, epoch=epoch.number, version=version)
        sending = asyncio.create_task(
            self.epochs.call_jointly(epoch, epoch.learner, publishing), name="publish weights"
        )
        received = await self.epochs.call_each(epoch.rollouts, receive, beside=sending)
        error = sending.exception()
        is_learner_lost = error is not None and blame.is_own_failure(epoch.learner, error)
        if len(received) < len(epoch.rollouts) and not is_learner_lost:
            telemetry.count(metrics.PUSHES, result="lost")
            await self.epochs.dissolve()
            return None
        sent = sending.result()
        self.epochs.succeeded()
        return Candidate(
            policy=PolicyTag(version=version, digest=format_digest(model_digest(sent.reports))),
            servers=await self._agreeing(epoch.rollouts, sent, received),
            began=began,
            metrics=_metrics(sent, received.values()) | {"perf/num_gpus": float(epoch.num_gpus)},
        )

    async def commit(self, candidate: Candidate) -> dict[str, float]:
        """Makes the candidate the policy that its servers sample from; returns the metrics of `weights/`.

        Raises:
            PeerLostError: no server committed.
        """
        opened: list[float] = []

        async def commit(member: Member) -> bool:
            await while_alive(member, self._rollout.commit(member, candidate.policy), self.epochs.gone)
            opened.append(time.monotonic())
            return True

        if not await self.epochs.call_each(candidate.servers, commit):
            raise PeerLostError("no rollout server committed the new weights; none is left", peer="rollout")
        seconds = time.monotonic() - candidate.began
        telemetry.count(metrics.PUSHES, result="committed")
        telemetry.record(metrics.PUSH_SECONDS, seconds)
        return {
            **candidate.metrics,
            "weights/first_open_ms": (min(opened) - candidate.began) * 1e3,
            "weights/pause_ms": seconds * 1e3,
        }

    async def _agreeing(
        self, members: Sequence[Member], sent: PushReceipt, received: Mapping[str, PushReceipt]
    ) -> tuple[Member, ...]:
        """Returns the servers that hold the learner's weights; if there are any, expels the others."""
        differences: dict[str, str] = {}
        for member in members:
            difference = disagreement(sent.reports[0], received[member.member_id].reports)
            if difference is not None:
                differences[member.member_id] = difference
        if len(differences) == len(members):
            raise WeightSyncError(next(iter(differences.values())))
        for member in members:
            if member.member_id in differences:
                await self.epochs.expel(member, f"WeightSyncError: {differences[member.member_id]}")
        return tuple(member for member in members if member.member_id not in differences)


def _metrics(sent: PushReceipt, received: Iterable[PushReceipt]) -> dict[str, float]:
    """Returns metrics: `weights/bytes` counts bytes from learners, `relayed_bytes` those between rollout
    ranks.

    Times and `peak_extra_bytes` (the staging) are the maximum over all ranks.
    """
    merged = PushReceipt.merge([sent, *received])
    return {
        "weights/bytes": float(sent.num_bytes),
        "weights/relayed_bytes": float(merged.relayed_bytes),
        "weights/peak_extra_bytes": float(merged.peak_extra_bytes),
        "weights/transfer_ms": merged.transfer_ms,
        "weights/digest_ms": merged.digest_ms,
    }
