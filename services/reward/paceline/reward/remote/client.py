"""Calls `Score` and `Describe` of `RewardService`; converts from and to protobuf."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from paceline.core.errors import ProtocolError, RewardError, RewardErrorKind
from paceline.core.scoring import REWARD_CONTRACT, RewardDescription, ScoreItem
from paceline.rpc.v1 import reward_pb2, reward_pb2_grpc
from paceline.service.grpc import channels
from paceline.wire.calls.attachment import Result, result_or_error
from paceline.wire.calls.protobuf import description_from_proto, score_item_to_proto


async def call_score(
    channel: grpc.aio.Channel,
    items: Sequence[ScoreItem],
    *,
    run_id: str,
    step: int,
    timeout_s: float,
    peer: str,
) -> list[Result]:
    """Returns one result per item, in the order of the items; a RewardError for an unusable result.

    Calls nobody about no items.

    Raises:
        PacelineError: the call failed, or the service did not answer with one result per item.
    """
    if not items:
        return []
    request = reward_pb2.ScoreRequest(
        run_id=run_id, step=step, items=[score_item_to_proto(item) for item in items]
    )
    score = reward_pb2_grpc.RewardServiceStub(channel).Score
    answer = await channels.call(score, request, timeout_s=timeout_s, phase="REWARD", peer=peer)
    if len(answer.results) != len(items):
        raise RewardError(
            f"the answer must hold one result for each item, and has {len(answer.results)} for {len(items)}",
            kind=RewardErrorKind.WRONG_COUNT,
        )
    by_id = {result.trajectory_id: result for result in answer.results}
    trajectory_ids = [item.trajectory_id for item in items]
    if by_id.keys() != set(trajectory_ids):
        raise RewardError(
            "the answer must hold one result for each item, each under its item's trajectory_id",
            kind=RewardErrorKind.WRONG_COUNT,
        )
    return [result_or_error(by_id[trajectory_id]) for trajectory_id in trajectory_ids]


async def call_describe(channel: grpc.aio.Channel, *, timeout_s: float, peer: str) -> RewardDescription:
    """Returns the service's description of itself; version 1 of the contract has no such call.

    Raises:
        PacelineError: the call failed, or the answer cannot be read.
    """
    describe = reward_pb2_grpc.RewardServiceStub(channel).Describe
    request = reward_pb2.DescribeRewardRequest(contract=REWARD_CONTRACT)
    try:
        answer = await channels.call(describe, request, timeout_s=timeout_s, phase="REWARD", peer=peer)
    except ProtocolError as error:
        cause = error.__cause__
        if isinstance(cause, grpc.aio.AioRpcError) and cause.code() is grpc.StatusCode.UNIMPLEMENTED:
            return RewardDescription(contract=1)
        raise
    return description_from_proto(answer)
