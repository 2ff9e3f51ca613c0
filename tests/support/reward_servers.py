"""Reward servers that misbehave, for the client's tests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from paceline.core.errors import PacelineError
from paceline.rpc.v1 import reward_pb2, reward_pb2_grpc
from paceline.service.grpc_server import start_server


class OddServer(reward_pb2_grpc.RewardServiceServicer):
    """Answers each call as its mode says; records the sizes of the calls."""

    def __init__(self, mode: str = "right") -> None:
        self.mode = mode
        self.calls: list[list[str]] = []
        self.step = -1

    async def Score(self, request: reward_pb2.ScoreRequest, context: object) -> reward_pb2.ScoreResponse:
        ids = [item.trajectory_id for item in request.items]
        self.calls.append(ids)
        self.step = request.step
        results = [_result(item) for item in request.items]
        match self.mode:
            case "hang":
                await asyncio.sleep(3600)
            case "hang_on_slow" if any(item.response == "slow" for item in request.items):
                await asyncio.sleep(3600)
            case "raise":
                raise PacelineError("the judge has no model")
            case "too_few":
                results.pop()
            case "too_many":
                results.append(results[0])
            case "other_ids":
                results[0].trajectory_id = "somebody else's"
            case "reversed":
                results.reverse()
            case "nan":
                results[0].reward = math.nan
            case "infinite_component":
                results[0].components["c"] = math.inf
            case "huge":
                results[0].reward = 1e308
            case "error":
                results[0].error = "no opinion"
            case "typed_error":
                results[0].error = "not_finite: f returned nan"
            case "slow_once":
                if len(self.calls) == 1:
                    await asyncio.sleep(3600)
        return reward_pb2.ScoreResponse(results=results)


def _result(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
    return reward_pb2.ScoreResult(
        trajectory_id=item.trajectory_id,
        reward=float(len(item.response)),
        components={"words": float(len(item.response.split()))},
    )


@asynccontextmanager
async def serving(servicer: OddServer, *, port: int = 0) -> AsyncIterator[str]:
    """The server's address."""
    add: Callable[..., None] = reward_pb2_grpc.add_RewardServiceServicer_to_server
    server = await start_server(add, servicer, port=port)
    try:
        yield server.address
    finally:
        await server.stop(grace_s=0)
