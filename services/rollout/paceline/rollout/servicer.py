"""RolloutService over gRPC: translates each call into an order to the server."""

from __future__ import annotations

from typing import Any

from paceline.core.errors import InvalidMessageError
from paceline.core.members import EnginePart
from paceline.rollout.server import RolloutServer
from paceline.rpc.v1 import rollout_pb2, rollout_pb2_grpc
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.wire.calls.protobuf import policy_tag_from_proto


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers calls; rollout.proto documents the methods."""

    def __init__(self, server: RolloutServer) -> None:
        self._server = server

    async def DescribeWeights(
        self, request: rollout_pb2.DescribeRolloutWeightsRequest, context: Any
    ) -> rollout_pb2.DescribeRolloutWeightsResponse:
        """Returns which part of which checkpoint tensor each rank needs."""
        layouts = await self._server.describe()
        return rollout_pb2.DescribeRolloutWeightsResponse(
            rank_layouts=[layout.to_bytes() for layout in layouts]
        )

    async def JoinWeightGroup(
        self, request: rollout_pb2.JoinRolloutGroupRequest, context: Any
    ) -> rollout_pb2.JoinRolloutGroupResponse:
        """Makes the server join the weight group."""
        spec = WeightGroupSpec.from_bytes(request.spec)
        await self._server.join(request.epoch, spec, request.rank_offset)
        return rollout_pb2.JoinRolloutGroupResponse()

    async def ReceiveWeights(
        self, request: rollout_pb2.ReceiveWeightsRequest, context: Any
    ) -> rollout_pb2.ReceiveWeightsResponse:
        """Makes the server receive a version's weights."""
        receipt = await self._server.receive(request.epoch, request.version)
        return rollout_pb2.ReceiveWeightsResponse(receipt=receipt.to_bytes())

    async def Commit(self, request: rollout_pb2.CommitRequest, context: Any) -> rollout_pb2.CommitResponse:
        """Makes the received version the policy."""
        await self._server.commit(policy_tag_from_proto(request.policy))
        return rollout_pb2.CommitResponse()

    async def Sleep(self, request: rollout_pb2.SleepRequest, context: Any) -> rollout_pb2.SleepResponse:
        """Frees the memory of the engine."""
        return rollout_pb2.SleepResponse(freed_bytes=await self._server.sleep())

    async def Wake(self, request: rollout_pb2.WakeRequest, context: Any) -> rollout_pb2.WakeResponse:
        """Takes a part of the engine's memory again."""
        await self._server.wake(_part(request.part))
        return rollout_pb2.WakeResponse()

    async def LeaveWeightGroup(
        self, request: rollout_pb2.LeaveRolloutGroupRequest, context: Any
    ) -> rollout_pb2.LeaveRolloutGroupResponse:
        """Makes the server leave the weight group."""
        await self._server.leave(request.epoch)
        return rollout_pb2.LeaveRolloutGroupResponse()


def _part(word: str) -> EnginePart:
    try:
        return EnginePart(word)
    except ValueError:
        known = ", ".join(part.value for part in EnginePart)
        raise InvalidMessageError(
            f"an engine has the parts {known}; got {word[:40]!r}", reason="unknown_part"
        ) from None
