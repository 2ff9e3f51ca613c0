"""The connection to a remote reward service: one call of `RewardService.Score`, protobuf in and out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from paceline.core.errors import InvalidMessageError, RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.rpc.v1 import reward_pb2, reward_pb2_grpc
from paceline.service import channels
from paceline.wire.protobuf import score_item_to_proto, score_result_from_proto


class RewardServiceClient:
    """A connection to one reward service.

    Args:
        name: the service's name in errors.
        address: host:port.
        token: what every call carries, for a service that asks for one.
        max_message_bytes: largest message.
    """

    def __init__(self, *, name: str, address: str, token: str, max_message_bytes: int) -> None:
        self._name, self._address = name, address
        self._token, self._max_message_bytes = token, max_message_bytes
        self._channel: grpc.aio.Channel | None = None

    async def connect(self, *, timeout_s: float) -> bool:
        """Connects; returns whether the service was reached in time. One that is down may come up later."""
        self._channel = channels.connect(
            self._address, token=self._token, max_message_bytes=self._max_message_bytes
        )
        try:
            async with asyncio.timeout(timeout_s):
                await self._channel.channel_ready()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Closes the connection."""
        if self._channel is not None:
            await self._channel.close()

    async def score(
        self, items: Sequence[ScoreItem], *, run_id: str, step: int, timeout_s: float
    ) -> list[ScoreResult | RewardError]:
        """One result per item, in the order of the items; a RewardError for a result that cannot be used.

        Raises:
            PacelineError: the call failed, or the service did not answer with one result per item.
        """
        assert self._channel is not None, "connect() comes first"
        request = reward_pb2.ScoreRequest(
            run_id=run_id, step=step, items=[score_item_to_proto(item) for item in items]
        )
        answer = await channels.call(
            reward_pb2_grpc.RewardServiceStub(self._channel).Score,
            request,
            timeout_s=timeout_s,
            phase="REWARD",
            peer=f"reward service {self._name} at {self._address}",
        )
        by_id = {result.trajectory_id: result for result in answer.results}
        trajectory_ids = [item.trajectory_id for item in items]
        if len(answer.results) != len(items) or by_id.keys() != set(trajectory_ids):
            raise RewardError(
                "the answer must hold one result for each item, each under its item's trajectory_id",
                kind=RewardErrorKind.WRONG_COUNT,
            )
        return [_read(by_id[trajectory_id]) for trajectory_id in trajectory_ids]


def _read(message: reward_pb2.ScoreResult) -> ScoreResult | RewardError:
    try:
        return score_result_from_proto(message)
    except InvalidMessageError as error:
        is_not_finite = error.reason == "not_finite"
        kind = RewardErrorKind.NOT_FINITE if is_not_finite else RewardErrorKind.WRONG_TYPE
        return RewardError(str(error), kind=kind)
