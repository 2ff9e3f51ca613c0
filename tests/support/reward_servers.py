"""Reward servers that misbehave, for the client's tests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from paceline.core.errors import PacelineError
from paceline.rpc.v1 import reward_pb2, reward_pb2_grpc
from paceline.service.grpc.server import start_server
from paceline.service.identity.credentials import Credentials

FOREVER_S = 3600.0

Results = list[reward_pb2.ScoreResult]


class OddServer(reward_pb2_grpc.RewardServiceServicer):
    """Answers as its mode says: right, late (`DELAYS`) or changed (`CHANGES`); records the calls."""

    def __init__(
        self, mode: str = "right", *, description: reward_pb2.RewardDescription | None = None
    ) -> None:
        assert mode in ("right", "counting") or mode in DELAYS or mode in CHANGES or mode in REFUSALS, mode
        self.mode = mode
        self.calls: list[list[str]] = []
        self.step = -1
        self.description, self.num_described = description, 0
        self.most_at_once = 0
        self._at_once = 0

    async def Describe(
        self, request: reward_pb2.DescribeRewardRequest, context: object
    ) -> reward_pb2.RewardDescription:
        self.num_described += 1
        if self.description is None:  # as an older service
            raise NotImplementedError
        return self.description

    async def Score(
        self,
        request: reward_pb2.ScoreRequest,
        context: grpc.aio.ServicerContext[reward_pb2.ScoreRequest, reward_pb2.ScoreResponse],
    ) -> reward_pb2.ScoreResponse:
        self.calls.append([item.trajectory_id for item in request.items])
        self.step = request.step
        if self.mode == "counting":
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            await asyncio.sleep(0.1)
            self._at_once -= 1
        if self.mode in REFUSALS:
            await REFUSALS[self.mode](self, request, context)
        if self.mode in DELAYS and DELAYS[self.mode](self, request):
            await asyncio.sleep(FOREVER_S)
        results = [_result(item) for item in request.items]
        if self.mode in CHANGES:
            CHANGES[self.mode](results)
        return reward_pb2.ScoreResponse(results=results)


def _has_slow_item(server: OddServer, request: reward_pb2.ScoreRequest) -> bool:
    return any(item.response == "slow" for item in request.items)


DELAYS: dict[str, Callable[[OddServer, reward_pb2.ScoreRequest], bool]] = {
    "hang": lambda server, request: True,
    "hang_on_slow": _has_slow_item,
    "slow_once": lambda server, request: len(server.calls) == 1,
}


async def _busy_twice(
    server: OddServer, request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext[Any, Any]
) -> None:
    if len(server.calls) <= 2:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "come back later")


async def _refuse_bad(
    server: OddServer, request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext[Any, Any]
) -> None:
    if any(item.response == "bad" for item in request.items):
        raise PacelineError("one response is bad")


REFUSALS = {"busy_twice": _busy_twice, "refuse_bad": _refuse_bad}


def _raise(results: Results) -> None:
    raise PacelineError("the judge has no model")


def _set_id(results: Results) -> None:
    results[0].trajectory_id = "somebody else's"


def _set_reward(value: float) -> Callable[[Results], None]:
    def change(results: Results) -> None:
        results[0].reward = value

    return change


def _set_infinite_component(results: Results) -> None:
    results[0].components["c"] = math.inf


def _set_error(text: str) -> Callable[[Results], None]:
    def change(results: Results) -> None:
        results[0].error = text

    return change


CHANGES: dict[str, Callable[[Results], object]] = {
    "raise": _raise,
    "too_few": lambda results: results.pop(),
    "too_many": lambda results: results.append(results[0]),
    "other_ids": _set_id,
    "reversed": lambda results: results.reverse(),
    "nan": _set_reward(math.nan),
    "infinite_component": _set_infinite_component,
    "huge": _set_reward(1e308),
    "error": _set_error("no opinion"),
    "typed_error": _set_error("not_finite: f returned nan"),
}


def _result(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
    return reward_pb2.ScoreResult(
        trajectory_id=item.trajectory_id,
        reward=float(len(item.response)),
        components={"words": float(len(item.response.split()))},
    )


@asynccontextmanager
async def serving(
    servicer: OddServer, *, port: int = 0, token: str = "", credentials: Credentials | None = None
) -> AsyncIterator[str]:
    """The server's address."""
    add: Callable[..., None] = reward_pb2_grpc.add_RewardServiceServicer_to_server
    credentials = credentials or Credentials(token=token)
    server = await start_server(add, servicer, port=port, credentials=credentials)
    try:
        yield server.address
    finally:
        await server.stop(grace_s=0)
