"""Calls any reward server and returns its scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from paceline.core.errors import RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.rpc.v1 import reward_pb2, reward_pb2_grpc
from paceline.service.grpc import channels
from paceline.service.identity.credentials import REWARD_TOKEN, Credentials
from paceline.wire.calls.protobuf import score_item_to_proto, score_result_from_proto


class RewardClient:
    """Asks a reward server; an async context manager.

    Args:
        address: host:port.
        token: the server's token; None takes PACELINE_REWARD_TOKEN from the environment.
    """

    def __init__(self, address: str, *, token: str | None = None) -> None:
        self._address = address
        self._credentials = Credentials.from_env(REWARD_TOKEN).with_token(token)

    async def __aenter__(self) -> Self:
        self._channel = channels.connect(self._address, credentials=self._credentials, role="reward")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def score(
        self, items: Sequence[ScoreItem], *, timeout_s: float = 30.0, run_id: str = "", step: int = 0
    ) -> list[ScoreResult]:
        """Scores items; returns the results in their order.

        Raises:
            DeadlineError: no answer within `timeout_s`.
            PeerLostError: the server cannot be reached.
            RewardError: WRONG_COUNT: the server did not answer with one result for each item.
            InvalidMessageError: an item cannot be sent, or a result is not finite.
            PacelineError: the server's own error.
        """
        request = reward_pb2.ScoreRequest(
            run_id=run_id, step=step, items=[score_item_to_proto(item) for item in items]
        )
        answer = await channels.call(
            reward_pb2_grpc.RewardServiceStub(self._channel).Score,
            request,
            timeout_s=timeout_s,
            phase="REWARD",
            peer=f"reward server at {self._address}",
        )
        ids = {item.trajectory_id for item in items}
        if len(answer.results) != len(items) or {result.trajectory_id for result in answer.results} != ids:
            raise RewardError(
                f"the reward server at {self._address} answered {len(answer.results)} results to "
                f"{len(items)} items, or under other trajectory ids than theirs",
                kind=RewardErrorKind.WRONG_COUNT,
            )
        results = {result.trajectory_id: score_result_from_proto(result) for result in answer.results}
        return [results[item.trajectory_id] for item in items]
