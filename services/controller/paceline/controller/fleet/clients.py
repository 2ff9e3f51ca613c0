"""Clients of the learner and of rollout servers: domain types in and out, a deadline on every call.

    Channels -> LearnerClient, RolloutClient

Every call is to one member and raises the errors of `paceline.service.grpc.channels.call`, with the member's
id as the peer. A frozen machine keeps its connections open; only its missing heartbeats show that it is gone.
So a call ends with PeerLostError as soon as its member is no longer in the fleet (`while_alive`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.config.run import RunConfig
from paceline.controller.fleet.membership import Member
from paceline.core.errors import InvalidMessageError, PacelineError, PeerLostError
from paceline.core.members import EnginePart
from paceline.core.policy import PolicyTag
from paceline.core.training import ChunkOrder, TrainOrder, TrainResult
from paceline.rpc.v1 import learner_pb2, learner_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from paceline.service.grpc.channels import call, connect
from paceline.service.identity.credentials import Credentials
from paceline.service.tasks import cancel
from paceline.weights.geometry.layout import RankLayout
from paceline.weights.geometry.sharding import Sharding
from paceline.weights.receipt import PushReceipt
from paceline.wire.calls.protobuf import policy_tag_to_proto
from paceline.wire.calls.training import chunk_to_proto, order_to_proto, result_from_proto

# A rank waits for others no longer than the configured time. The call's deadline is later, so that the
# rank's own error, which names the rank that it waited for, arrives first.
_GRACE_S = 15.0
_PROBE_S = 1.0

T = TypeVar("T")
_Request = TypeVar("_Request")
Gone = Callable[[Member], Coroutine[Any, Any, None]]
"""Returns when a member is no longer in the fleet."""


async def while_alive(member: Member, call: Coroutine[Any, Any, T], gone: Gone) -> T:
    """Awaits a call to a member; raises PeerLostError as soon as the member is no longer in the fleet."""
    calling, leaving = asyncio.create_task(call), asyncio.create_task(gone(member))
    try:
        await asyncio.wait([calling, leaving], return_when=asyncio.FIRST_COMPLETED)
        if calling.done():
            return calling.result()
        raise PeerLostError(f"{member.member_id} is gone: {member.failure}", peer=member.member_id)
    finally:
        await cancel(calling, leaving)


async def is_serving(address: str, incarnation: str, *, role: str, credentials: Credentials) -> bool:
    """Returns whether this incarnation answers at its address within a second, and is not about to leave.

    Another process may have taken the port of a process that has ended.
    """
    channel = connect(address, credentials=credentials, role=role)
    try:
        answer = await call(
            health_pb2_grpc.HealthStub(channel).Check,
            health_pb2.HealthCheckRequest(service=incarnation),
            timeout_s=_PROBE_S,
            phase="PROBE",
            peer=address,
        )
    except PacelineError:
        return False
    finally:
        await channel.close(grace=None)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerWeights:
    """The learner's weights: a layout per rank, the rendezvous, the version that it holds."""

    layouts: Sharding
    store_host: str
    store_port: int
    version: int


class Channels:
    """One gRPC channel per member, opened when first used; every call carries the controller's term.

    A member that is started again at another address gets a new channel. gRPC closes the old one when the
    last call over it is over.
    """

    def __init__(self, config: RunConfig, credentials: Credentials, term: int) -> None:
        self._max_message_bytes = config.service.max_message_mib << 20
        self._credentials, self._term = credentials, term
        self._channels: dict[str, tuple[str, grpc.aio.Channel]] = {}

    def to(self, member: Member) -> grpc.aio.Channel:
        """Returns the channel to a member's address."""
        address, channel = self._channels.get(member.member_id, ("", None))
        if channel is None or address != member.address:
            channel = connect(
                member.address,
                credentials=self._credentials,
                role=member.kind.value,
                max_message_bytes=self._max_message_bytes,
                term=self._term,
            )
            self._channels[member.member_id] = member.address, channel
        return channel

    async def close(self) -> None:
        """Closes the channels to all members."""
        for _, channel in self._channels.values():
            await channel.close(grace=None)
        self._channels.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class FreedMemory:
    """Bytes that the learner's ranks freed, and whether a whole engine now has room beside them."""

    freed_bytes: int
    is_enough: bool


class _Client:
    """Calls members, each call with a deadline.

    Args:
        gone: returns when a member is no longer in the fleet; None: calls do not watch for that.
    """

    def __init__(self, config: RunConfig, channels: Channels, gone: Gone | None = None) -> None:
        self._channels, self._gone = channels, gone
        self._quick_s, self._command_s = config.service.rpc_timeout_s, config.learner.command_timeout_s
        self._join_s = config.weights.join_timeout_s + _GRACE_S
        self._push_s = config.weights.push_timeout_s + _GRACE_S

    async def _call(
        self,
        member: Member,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, T],
        request: _Request,
        phase: str,
        *,
        timeout_s: float,
    ) -> T:
        calling = call(method, request, timeout_s=timeout_s, phase=phase, peer=member.member_id)
        return await (calling if self._gone is None else while_alive(member, calling, self._gone))


class LearnerClient(_Client):
    """Calls the learner, each call with a deadline."""

    async def describe(self, member: Member) -> LearnerWeights:
        """Asks for the learner's layouts and for its rendezvous."""
        request = learner_pb2.DescribeLearnerWeightsRequest()
        reply = await self._call(
            member, self._to(member).DescribeWeights, request, "FORMING", timeout_s=self._quick_s
        )
        return LearnerWeights(
            layouts=Sharding.from_bytes(reply.sharding),
            store_host=reply.store_host,
            store_port=reply.store_port,
            version=reply.version,
        )

    async def join(self, member: Member, *, epoch: int, spec: bytes) -> None:
        """Makes the learner's ranks join the weight group of a packed `WeightGroupSpec`."""
        request = learner_pb2.JoinLearnerGroupRequest(epoch=epoch, spec=spec)
        await self._call(member, self._to(member).JoinWeightGroup, request, "FORMING", timeout_s=self._join_s)

    async def publish(self, member: Member, *, epoch: int, version: int) -> PushReceipt:
        """Makes the learner send its weights; the receipt has one report, for all of its ranks."""
        request = learner_pb2.PublishWeightsRequest(epoch=epoch, version=version)
        reply = await self._call(
            member, self._to(member).PublishWeights, request, "PUBLISH", timeout_s=self._push_s
        )
        receipt = PushReceipt.from_bytes(reply.receipt)
        if len(receipt.reports) != 1:
            raise InvalidMessageError(
                f"the learner's push receipt must have one digest report, got {len(receipt.reports)}",
                reason="bad_receipt",
            )
        return receipt

    async def abandon(self, member: Member, *, epoch: int, lost: str) -> None:
        """Makes the learner free every rank that waits for the member `lost` in a join or push."""
        request = learner_pb2.AbandonPushRequest(epoch=epoch, lost=lost)
        await self._call(member, self._to(member).AbandonPush, request, "PUBLISH", timeout_s=self._quick_s)

    async def leave(self, member: Member, *, epoch: int) -> None:
        """Makes the learner's ranks leave the weight group."""
        request = learner_pb2.LeaveLearnerGroupRequest(epoch=epoch)
        await self._call(
            member, self._to(member).LeaveWeightGroup, request, "FORMING", timeout_s=self._join_s
        )

    async def free(self, member: Member, parts: Sequence[EnginePart], engine_bytes: int) -> FreedMemory:
        """Makes every rank give back the GPU memory that it only caches.

        Args:
            parts: parts of an engine that wake next; ranks whose GPU has room for them keep their cache.
                Empty: all ranks free it.
            engine_bytes: bytes of a GPU that an engine took when it was last awake; 0: not measured.
        """
        request = learner_pb2.FreeMemoryRequest(
            parts=[part.value for part in parts], engine_bytes=engine_bytes
        )
        reply = await self._call(
            member, self._to(member).FreeMemory, request, "TURN", timeout_s=self._quick_s
        )
        return FreedMemory(freed_bytes=reply.freed_bytes, is_enough=reply.has_room)

    async def train(self, member: Member, order: TrainOrder) -> TrainResult:
        """Makes the learner train one step."""
        reply = await self._call(
            member, self._to(member).TrainStep, order_to_proto(order), "LEARN", timeout_s=self._command_s
        )
        return result_from_proto(reply)

    async def work_ahead(self, member: Member, order: ChunkOrder) -> None:
        """Makes the learner compute the work ahead for a chunk of the next step."""
        await self._call(
            member,
            self._to(member).WorkAhead,
            chunk_to_proto(order),
            "COLLECT",
            timeout_s=self._command_s,
        )

    async def save(self, member: Member, *, step: int, folder: str, controller_state: bytes) -> float:
        """Makes the learner begin to write a checkpoint; returns the seconds of its delay."""
        request = learner_pb2.SaveCheckpointRequest(
            step=step, folder=folder, controller_state=controller_state
        )
        reply = await self._call(
            member, self._to(member).SaveCheckpoint, request, "CHECKPOINT", timeout_s=self._command_s
        )
        return reply.seconds

    async def wait_checkpoint(self, member: Member, *, step: int) -> float:
        """Waits until the checkpoint that was saved last is complete; returns the seconds of its writing.

        Raises:
            CheckpointError: the checkpoint could not be written; the learner goes on without it.
        """
        request = learner_pb2.WaitCheckpointRequest(step=step)
        reply = await self._call(
            member, self._to(member).WaitCheckpoint, request, "CHECKPOINT", timeout_s=self._command_s
        )
        return reply.seconds

    async def load(self, member: Member, *, folder: str, version: int) -> float:
        """Makes the learner, at `version`, load the weights of a checkpoint; returns the seconds it took."""
        request = learner_pb2.LoadCheckpointRequest(folder=folder, version=version)
        reply = await self._call(
            member, self._to(member).LoadCheckpoint, request, "ROLLBACK", timeout_s=self._command_s
        )
        return reply.seconds

    async def restart(self, member: Member, *, reason: str) -> None:
        """Makes the learner end, so that it is started again and loads its newest checkpoint."""
        request = learner_pb2.RestartRequest(reason=reason)
        await self._call(member, self._to(member).Restart, request, "FORMING", timeout_s=self._quick_s)

    def _to(self, member: Member) -> learner_pb2_grpc.LearnerServiceStub:
        return learner_pb2_grpc.LearnerServiceStub(self._channels.to(member))


class RolloutClient(_Client):
    """Calls rollout servers, each call with a deadline."""

    async def describe(self, member: Member) -> tuple[RankLayout, ...]:
        """Asks for the layout of each rank of a server."""
        request = rollout_pb2.DescribeRolloutWeightsRequest()
        reply = await self._call(
            member, self._to(member).DescribeWeights, request, "FORMING", timeout_s=self._quick_s
        )
        return tuple(RankLayout.from_bytes(data) for data in reply.rank_layouts)

    async def join(self, member: Member, *, epoch: int, spec: bytes, rank_offset: int) -> None:
        """Makes a server's ranks join the group of a packed `WeightGroupSpec`, from rank `rank_offset` on."""
        request = rollout_pb2.JoinRolloutGroupRequest(epoch=epoch, spec=spec, rank_offset=rank_offset)
        await self._call(member, self._to(member).JoinWeightGroup, request, "FORMING", timeout_s=self._join_s)

    async def receive(self, member: Member, *, epoch: int, version: int) -> PushReceipt:
        """Makes a server receive a version; the receipt has one report per rank."""
        request = rollout_pb2.ReceiveWeightsRequest(epoch=epoch, version=version)
        reply = await self._call(
            member, self._to(member).ReceiveWeights, request, "PUBLISH", timeout_s=self._push_s
        )
        return PushReceipt.from_bytes(reply.receipt)

    async def commit(self, member: Member, policy: PolicyTag) -> None:
        """Makes a received version the policy that a server samples from."""
        request = rollout_pb2.CommitRequest(policy=policy_tag_to_proto(policy))
        await self._call(member, self._to(member).Commit, request, "COMMIT", timeout_s=self._quick_s)

    async def sleep(self, member: Member) -> int:
        """Makes a server free its engine's GPU memory; returns the most bytes of a GPU freed so far."""
        request = rollout_pb2.SleepRequest()
        reply = await self._call(
            member, self._to(member).Sleep, request, "TURN", timeout_s=self._quick_s + _GRACE_S
        )
        return int(reply.freed_bytes)

    async def wake(self, member: Member, part: EnginePart) -> None:
        """Makes a server take the memory of a part of its engine again."""
        request = rollout_pb2.WakeRequest(part=part.value)
        await self._call(member, self._to(member).Wake, request, "TURN", timeout_s=self._quick_s + _GRACE_S)

    async def leave(self, member: Member, *, epoch: int) -> None:
        """Makes a server's ranks leave the weight group."""
        request = rollout_pb2.LeaveRolloutGroupRequest(epoch=epoch)
        await self._call(
            member, self._to(member).LeaveWeightGroup, request, "FORMING", timeout_s=self._join_s
        )

    def _to(self, member: Member) -> rollout_pb2_grpc.RolloutServiceStub:
        return rollout_pb2_grpc.RolloutServiceStub(self._channels.to(member))
