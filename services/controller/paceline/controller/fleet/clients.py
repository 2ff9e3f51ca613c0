"""Calls to the learner and to rollout servers: channels by address, every call with a deadline and a name for its errors."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from paceline.config.run import RunConfig
from paceline.controller.fleet.membership import Member
from paceline.core.errors import InvalidMessageError
from paceline.core.policy import PolicyTag
from paceline.core.training import TrainOrder, TrainResult
from paceline.rpc.v1 import common_pb2, learner_pb2, learner_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from paceline.service.channels import call, connect
from paceline.weights.geometry.layout import RankLayout
from paceline.weights.receipt import PushReceipt
from paceline.wire.training import order_to_proto, result_from_proto

# Beyond the time that a rank may wait for another within a join or a push: the rank's own word, which names the culprit, comes first.
_SPREAD_S = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerWeights:
    """What the learner says of its weights: a layout per rank, the rendezvous, the version it holds, its device."""

    layouts: tuple[RankLayout, ...]
    store_host: str
    store_port: int
    version: int
    device: str


class Peers:
    """Opens one channel per address and speaks the services' protocols over it."""

    def __init__(self, config: RunConfig, token: str) -> None:
        self._config, self._token = config, token
        self._channels: dict[str, grpc.aio.Channel] = {}

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            limit = self._config.service.max_message_mib << 20
            self._channels[address] = connect(address, token=self._token, max_message_bytes=limit)
        return self._channels[address]

    async def close(self) -> None:
        """Closes every channel."""
        for channel in self._channels.values():
            await channel.close(grace=None)
        self._channels.clear()

    # --- learner

    async def learner_weights(self, member: Member) -> LearnerWeights:
        """Asks the learner for its layouts."""
        stub = learner_pb2_grpc.LearnerServiceStub(self._channel(member.address))
        reply = await call(
            stub.DescribeWeights,
            learner_pb2.DescribeLearnerWeightsRequest(),
            timeout_s=self._config.service.rpc_timeout_s,
            phase="FORMING",
            peer=member.member_id,
        )
        return LearnerWeights(
            layouts=tuple(RankLayout.from_bytes(data) for data in reply.rank_layouts),
            store_host=reply.store_host,
            store_port=reply.store_port,
            version=reply.version,
            device=reply.device,
        )

    async def join_learner(self, member: Member, *, epoch: int, spec: bytes) -> None:
        """Has the learner's ranks form the group."""
        stub = learner_pb2_grpc.LearnerServiceStub(self._channel(member.address))
        request = learner_pb2.JoinLearnerGroupRequest(epoch=epoch, spec=spec)
        await call(
            stub.JoinWeightGroup, request, timeout_s=self._join_s, phase="FORMING", peer=member.member_id
        )

    async def publish(self, member: Member, *, epoch: int, version: int) -> PushReceipt:
        """Has the learner send its weights; the receipt has one report, for all of its ranks."""
        stub = learner_pb2_grpc.LearnerServiceStub(self._channel(member.address))
        request = learner_pb2.PublishWeightsRequest(epoch=epoch, version=version)
        reply = await call(
            stub.PublishWeights, request, timeout_s=self._push_s, phase="PUBLISH", peer=member.member_id
        )
        receipt = PushReceipt.from_bytes(reply.receipt)
        if len(receipt.reports) != 1:
            raise InvalidMessageError(
                f"the learner's push receipt must have one digest report, got {len(receipt.reports)}",
                reason="bad_receipt",
            )
        return receipt

    async def leave_learner(self, member: Member, *, epoch: int) -> None:
        """Has the learner's ranks let go of the group."""
        stub = learner_pb2_grpc.LearnerServiceStub(self._channel(member.address))
        request = learner_pb2.LeaveLearnerGroupRequest(epoch=epoch)
        await call(
            stub.LeaveWeightGroup, request, timeout_s=self._join_s, phase="FORMING", peer=member.member_id
        )

    async def abandon_push(self, member: Member, *, epoch: int, lost: str) -> None:
        """Has the learner free every rank that waits for the member `lost` in a join or push."""
        stub = learner_pb2_grpc.LearnerServiceStub(self._channel(member.address))
        request = learner_pb2.AbandonPushRequest(epoch=epoch, lost=lost)
        timeout_s = self._config.service.rpc_timeout_s
        await call(stub.AbandonPush, request, timeout_s=timeout_s, phase="PUBLISH", peer=member.member_id)

    async def train(self, member: Member, order: TrainOrder) -> TrainResult:
        """Has the learner train one step."""
        stub = learner_pb2_grpc.LearnerServiceStub(self._channel(member.address))
        reply: learner_pb2.TrainStepResponse = await call(
            stub.TrainStep,
            order_to_proto(order),
            timeout_s=self._config.learner.command_timeout_s,
            phase="LEARN",
            peer=member.member_id,
        )
        return result_from_proto(reply)

    async def save(self, member: Member, *, step: int, folder: str, controller_state: bytes) -> float:
        """Has the learner write a checkpoint; returns the seconds it took."""
        stub = learner_pb2_grpc.LearnerServiceStub(self._channel(member.address))
        request = learner_pb2.SaveCheckpointRequest(
            step=step, folder=folder, controller_state=controller_state
        )
        reply = await call(
            stub.SaveCheckpoint,
            request,
            timeout_s=self._config.learner.command_timeout_s,
            phase="CHECKPOINT",
            peer=member.member_id,
        )
        return float(reply.seconds)

    async def load(self, member: Member, *, folder: str, version: int) -> float:
        """Has the learner, which is at `version`, take the weights of a checkpoint; returns the seconds it took."""
        stub = learner_pb2_grpc.LearnerServiceStub(self._channel(member.address))
        request = learner_pb2.LoadCheckpointRequest(folder=folder, version=version)
        reply = await call(
            stub.LoadCheckpoint,
            request,
            timeout_s=self._config.learner.command_timeout_s,
            phase="ROLLBACK",
            peer=member.member_id,
        )
        return float(reply.seconds)

    # --- rollout

    async def rollout_layouts(self, member: Member) -> tuple[RankLayout, ...]:
        """Asks a rollout server what each of its ranks needs."""
        stub = rollout_pb2_grpc.RolloutServiceStub(self._channel(member.address))
        reply = await call(
            stub.DescribeWeights,
            rollout_pb2.DescribeRolloutWeightsRequest(),
            timeout_s=self._config.service.rpc_timeout_s,
            phase="FORMING",
            peer=member.member_id,
        )
        return tuple(RankLayout.from_bytes(data) for data in reply.rank_layouts)

    async def join_rollout(self, member: Member, *, epoch: int, spec: bytes, rank_offset: int) -> None:
        """Has a rollout server's ranks form the group."""
        stub = rollout_pb2_grpc.RolloutServiceStub(self._channel(member.address))
        request = rollout_pb2.JoinRolloutGroupRequest(epoch=epoch, spec=spec, rank_offset=rank_offset)
        await call(
            stub.JoinWeightGroup, request, timeout_s=self._join_s, phase="FORMING", peer=member.member_id
        )

    async def receive(self, member: Member, *, epoch: int, version: int) -> PushReceipt:
        """Has a rollout server receive a version; the receipt has one report per rank."""
        stub = rollout_pb2_grpc.RolloutServiceStub(self._channel(member.address))
        request = rollout_pb2.ReceiveWeightsRequest(epoch=epoch, version=version)
        reply = await call(
            stub.ReceiveWeights, request, timeout_s=self._push_s, phase="PUBLISH", peer=member.member_id
        )
        return PushReceipt.from_bytes(reply.receipt)

    async def commit(self, member: Member, policy: PolicyTag) -> None:
        """Makes a received version a server's policy."""
        stub = rollout_pb2_grpc.RolloutServiceStub(self._channel(member.address))
        tag = common_pb2.PolicyTag(version=policy.version, digest=policy.digest)
        await call(
            stub.Commit,
            rollout_pb2.CommitRequest(policy=tag),
            timeout_s=self._config.service.rpc_timeout_s,
            phase="COMMIT",
            peer=member.member_id,
        )

    async def leave_rollout(self, member: Member, *, epoch: int) -> None:
        """Has a rollout server's ranks let go of the group."""
        stub = rollout_pb2_grpc.RolloutServiceStub(self._channel(member.address))
        request = rollout_pb2.LeaveRolloutGroupRequest(epoch=epoch)
        await call(
            stub.LeaveWeightGroup, request, timeout_s=self._join_s, phase="FORMING", peer=member.member_id
        )

    @property
    def _join_s(self) -> float:
        return self._config.weights.join_timeout_s + _SPREAD_S

    @property
    def _push_s(self) -> float:
        return self._config.weights.push_timeout_s + _SPREAD_S
